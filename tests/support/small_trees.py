"""Trees of a few calls, built the slow and obvious way.

Not by `build_batch`: what reads its rows must not be tested on a mistake that both share.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Calls = Sequence[tuple[Sequence[int], Sequence[int]]]


@dataclass
class Node:
    token: int
    depth: int
    call: int = -1
    children: list[Node] = field(default_factory=list)


@dataclass
class SmallTree:
    """T tokens in depth-first order, (T,) int64 each; call is -1 where nobody sampled."""

    ids: np.ndarray[Any, Any]
    depths: np.ndarray[Any, Any]
    call: np.ndarray[Any, Any]


def tree_of(calls: Calls) -> SmallTree:
    """A prompt runs through what is there; every sampled token is a token of its own."""
    above = Node(-1, -1)
    for number, (prompt, response) in enumerate(calls):
        node = above
        for place, token in enumerate([*prompt, *response]):
            is_sampled = place >= len(prompt)
            same = [each for each in node.children if each.token == token]
            if is_sampled or not same:
                same = [Node(token, place, number if is_sampled else -1)]
                node.children += same
            node = same[0]
    nodes = []
    stack = above.children[::-1]
    while stack:
        nodes.append(stack.pop())
        stack += nodes[-1].children[::-1]
    return SmallTree(
        *(np.array([getattr(n, name) for n in nodes]) for name in ("token", "depth", "call"))
    )


def forked_calls(seed: int, n_tokens: int = 6) -> list[tuple[list[int], list[int]]]:
    """Continuations, siblings, retries of equal answers, forks, rewritten ends and new roots."""
    chances = random.Random(seed)

    def ids(low: int) -> list[int]:
        return [chances.randrange(1, 30) for _ in range(chances.randrange(low, n_tokens))]

    calls = [(ids(2), ids(2))]
    for _ in range(9):
        prompt, response = calls[chances.randrange(len(calls))]
        kind = chances.choice(["continue", "continue", "retry", "same", "fork", "rewrite", "root"])
        if kind == "retry":
            calls.append((prompt, ids(1)))
        elif kind == "same":
            calls.append((prompt, response))
        else:
            begins = {
                "continue": [*prompt, *response],
                "fork": prompt[: chances.randrange(1, len(prompt) + 1)],
                "rewrite": [*prompt, *response[:-1]],
                "root": [],
            }[kind]
            calls.append(([*begins, *ids(2)], ids(1)))
    return calls
