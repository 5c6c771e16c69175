"""Level ``tree``: the prefix tree of a rollout's calls, in depth-first order."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from operator import is_

from agl_fast.reference.calls import RolloutLike, Turn
from agl_fast.reference.chains import CONTEXT
from agl_fast.reference.rows import Row
from agl_fast.rows.accounting import Accounting


@dataclass(eq=False)
class Node:
    """A token of the tree.

    ``made_by`` is the call that added it, ``sampled_by`` the call that sampled it, or ``CONTEXT``.
    """

    token: int
    depth: int
    parent: Node | None
    made_by: int
    sampled_by: int
    log_prob: float | None
    children: list[Node] = field(default_factory=list)


def grow_tree(turns: list[Turn]) -> tuple[Node, dict[int, Node]]:
    """Build the tree: its root, which holds no token, and the last node of every call."""
    root = Node(-1, -1, None, CONTEXT, CONTEXT, None)
    ends: dict[int, Node] = {}
    for turn in turns:
        at = deepest_match(root, turn.prompt)
        for token in turn.prompt[at.depth + 1 :]:
            at = _append(at, token, turn.index, CONTEXT, None)
        log_probs: list[float | None] = [None] * len(turn.response)
        if turn.log_probs is not None:
            log_probs = [*turn.log_probs]
        for token, log_prob in zip(turn.response, log_probs, strict=True):
            at = _append(at, token, turn.index, turn.index, log_prob)
        ends[turn.index] = at
    return root, ends


def deepest_match(root: Node, prompt: list[int]) -> Node:
    """Follow the longest path that matches the prompt; of equal paths, the one added last."""
    reached = [root]
    for token in prompt:
        children = [child for node in reached for child in node.children if child.token == token]
        if not children:
            break
        reached = children
    return max(reached, key=lambda node: node.made_by)


def _append(parent: Node, token: int, call: int, sampled_by: int, log_prob: float | None) -> Node:
    node = Node(token, parent.depth + 1, parent, call, sampled_by, log_prob)
    parent.children.append(node)
    return node


def depth_first(root: Node) -> list[Node]:
    """All nodes in depth-first order; children in the order of insertion."""
    order: list[Node] = []
    waiting = root.children[::-1]
    while waiting:
        order.append(waiting.pop())
        waiting += order[-1].children[::-1]
    return order


def path_to(node: Node) -> list[Node]:
    """The nodes from the root to the node."""
    path: list[Node] = []
    at: Node | None = node
    while at is not None and at.parent is not None:
        path.append(at)
        at = at.parent
    return path[::-1]


def deal_out(root: Node, ends: dict[int, Node], max_tokens: int) -> list[list[int]]:
    """Split the calls, in depth-first order, into rows of at most ``max_tokens``.

    A longer call is in no row. The split has the fewest tokens, then the fewest rows, then the most
    calls in the first row.
    """
    place = {node: index for index, node in enumerate(depth_first(root))}
    calls = sorted(
        (call for call, end in ends.items() if end.depth < max_tokens),
        key=lambda call: place[ends[call]],
    )
    paths = [path_to(ends[call]) for call in calls]
    shared = [0, *(sum(map(is_, before, path)) for before, path in pairwise(paths))]
    # best[first call of a row]: tokens and rows from there on, and minus the next row's first call.
    best = {len(calls): (0, 0, 0)}
    for first in reversed(range(len(calls))):
        ways = []
        n_tokens = shared[first]  # repeated from the row before
        for stop in range(first + 1, len(calls) + 1):
            n_tokens += len(paths[stop - 1]) - shared[stop - 1]
            if n_tokens > max_tokens:
                break
            n_behind, n_rows, _ = best[stop]
            ways.append((n_tokens + n_behind, n_rows + 1, -stop))
        best[first] = min(ways)
    rows = []
    first = 0
    while first < len(calls):
        stop = -best[first][2]
        rows.append(calls[first:stop])
        first = stop
    return rows


def tree_rows(
    rollout: RolloutLike, turns: list[Turn], max_tokens: int, reward: float, accounting: Accounting
) -> list[Row]:
    """Rows: the nodes on the paths of a row's calls, in the order of the whole tree."""
    rows: list[Row] = []
    root, ends = grow_tree(turns)
    order = depth_first(root)
    for calls in deal_out(root, ends, max_tokens):
        own = {node for call in calls for node in path_to(ends[call])}
        nodes = [node for node in order if node in own]
        # Tokens sampled by a call of another row are context here.
        sampled_by = [node.sampled_by if node.sampled_by in calls else CONTEXT for node in nodes]
        n_prompt = sampled_by.index(calls[0])
        row = Row(
            rollout_id=rollout.rollout_id,
            data_id=rollout.data_id,
            first_call=calls[0],
            prompt=[node.token for node in nodes[:n_prompt]],
            response=[node.token for node in nodes[n_prompt:]],
            sampled_by=sampled_by[n_prompt:],
            log_probs=[
                node.log_prob if call != CONTEXT else None
                for node, call in zip(nodes, sampled_by, strict=True)
            ][n_prompt:],
            positions=[node.depth for node in nodes],
            is_dropped=False,
            score=reward,
        )
        rows.append(row)
        accounting.trained += sum(row.response_mask)
    n_sampled = sum(len(turn.response) for turn in turns)
    n_dropped = n_sampled - sum(sum(row.response_mask) for row in rows)
    accounting.dropped += n_dropped
    accounting.dropped_by_reason["overlong_call"] += n_dropped
    return rows
