"""Truncate or pad sequences to one width, with attention masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Padded = tuple[list[int], list[int]]


def get_left_padded_ids_and_attention_mask(
    ids: Sequence[int], max_length: int, pad_token_id: int
) -> Padded:
    """Keep the last ``max_length`` ids, pad on the left: (ids, mask) of that length."""
    kept = list(ids)[max(len(ids) - max_length, 0) :]
    gap = max_length - len(kept)
    return [pad_token_id] * gap + kept, [0] * gap + [1] * len(kept)


def get_right_padded_ids_and_attention_mask(
    ids: Sequence[int], max_length: int, pad_token_id: int
) -> Padded:
    """Keep the first ``max_length`` ids, pad on the right: (ids, mask) of that length."""
    kept = list(ids)[:max_length]
    gap = max_length - len(kept)
    return kept + [pad_token_id] * gap, [1] * len(kept) + [0] * gap


def pad_left(ids: Any, max_length: int | None = None, pad_token_id: int = 0) -> tuple[Any, Any]:
    """Left-pad one sequence to two lists, or a batch to two lists of lists.

    ``max_length=None`` means the longest sequence.
    """
    return _pad(get_left_padded_ids_and_attention_mask, ids, max_length, pad_token_id)


def pad_right(ids: Any, max_length: int | None = None, pad_token_id: int = 0) -> tuple[Any, Any]:
    """Right-pad one sequence to two lists, or a batch to two lists of lists.

    ``max_length=None`` means the longest sequence.
    """
    return _pad(get_right_padded_ids_and_attention_mask, ids, max_length, pad_token_id)


def _pad(
    pad_one: Callable[[Sequence[int], int, int], Padded],
    ids: Any,
    max_length: int | None,
    pad_token_id: int,
) -> tuple[Any, Any]:
    is_batch = len(ids) > 0 and hasattr(ids[0], "__len__")
    rows = list(ids) if is_batch else [ids]
    width = max(len(row) for row in rows) if max_length is None else max_length
    padded = [pad_one(row, width, pad_token_id) for row in rows]
    if not is_batch:
        return padded[0]
    return [row for row, _ in padded], [mask for _, mask in padded]
