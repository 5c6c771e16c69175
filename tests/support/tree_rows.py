"""Tree rows read the way docs/tree.md tells consumers to: from position_ids alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agl_fast import reference
from support.plain_rollouts import PlainCall, PlainRollout

NO_PARENT = -1


@dataclass(frozen=True)
class TreeRow:
    """One row; ``call``, ``scores`` and ``log_probs`` have an entry a token, the prompt's too."""

    rollout_id: str
    ids: list[int]
    depth: list[int]
    mask: list[int]
    call: list[int]
    parent: list[int]
    n_prompt: int
    scores: list[float]
    log_probs: list[float] | None

    def path(self, index: int) -> list[int]:
        """Indices of the token's context and of itself."""
        indices = [index]
        while self.parent[indices[-1]] != NO_PARENT:
            indices.append(self.parent[indices[-1]])
        return indices[::-1]

    def tokens_to(self, index: int) -> list[int]:
        return [self.ids[at] for at in self.path(index)]

    def sampled(self) -> dict[int, list[int]]:
        """Indices of what each call sampled."""
        found: dict[int, list[int]] = {}
        for index, call in enumerate(self.call):
            if call != -1:
                found.setdefault(call, []).append(index)
        return found


def parents(depth: Sequence[int]) -> list[int]:
    """The index of each token's parent: the last token before it that is one less deep."""
    found = []
    path: list[int] = []
    for index, own in enumerate(depth):
        assert own <= len(path), f"depth {own} at {index} follows depth {len(path) - 1}"
        del path[own:]
        found.append(path[-1] if path else NO_PARENT)
        path.append(index)
    return found


def tree_rows(batch: reference.Batch) -> list[TreeRow]:
    """The rows of a jagged batch of lists, built with ``call_index=True``."""
    tensors = batch.tensors
    rows = []
    for index, rollout_id in enumerate(batch.columns["rollout_id_list"]):
        n_prompt = len(tensors["prompts"][index])
        log_probs = tensors["rollout_log_probs"][index] if "rollout_log_probs" in tensors else None
        row = TreeRow(
            rollout_id=rollout_id,
            ids=tensors["input_ids"][index],
            depth=tensors["position_ids"][index],
            mask=[0] * n_prompt + tensors["response_mask"][index],
            call=[-1] * n_prompt + tensors["call_index"][index],
            parent=parents(tensors["position_ids"][index]),
            n_prompt=n_prompt,
            scores=[0.0] * n_prompt + tensors["token_level_scores"][index],
            log_probs=log_probs and [0.0] * n_prompt + log_probs,
        )
        assert row.ids == tensors["prompts"][index] + tensors["responses"][index]
        assert len(row.ids) == len(row.depth) == len(row.mask) == len(row.call)
        rows.append(row)
    return rows


def laid_out(rollout: PlainRollout) -> list[tuple[int, PlainCall]]:
    """The calls that none of the four rules leaves out, with their indices."""
    kept = []
    seen = []
    for index, call in enumerate(rollout.calls):
        key = (call.response_id, call.prompt_ids, call.response_ids)
        duplicate = bool(call.response_id) and key in seen
        seen.append(key)
        if duplicate or call.finish_reason == "abort" or not call.trainable:
            continue
        if call.prompt_ids and call.response_ids:
            kept.append((index, call))
    return kept


def oracle_size(calls: Sequence[PlainCall]) -> int:
    """Tokens of the calls' tree: those of a plain trie, and answers that were there already."""
    trie: set[tuple[int, ...]] = set()
    n_again = 0
    for call in calls:
        context = call.context
        for length in range(1, len(context) + 1):
            prefix = tuple(context[:length])
            n_again += prefix in trie and length > len(call.prompt_ids)
            trie.add(prefix)
    return len(trie) + n_again
