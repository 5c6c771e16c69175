"""Batches of trees, one row a rollout or several, from the trees of small_trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

import agl_fast
from small_trees import SmallTree, tree_of


def tree_batch(
    rollouts: Sequence[agl_fast.Rollout], *, max_tokens: int, merge_samples: bool = False
) -> agl_fast.Batch:
    """Rows like those of level tree: the prompt is one token wide.

    Args:
        max_tokens: of a tree, beyond which the next call begins another one.
    """
    trees, rollout_of_row = [], []
    for number, rollout in enumerate(rollouts):
        for first, tree in _split(rollout, max_tokens, merge_samples):
            trees.append(replace(tree, call=np.where(tree.call < 0, -1, tree.call + first)))
            rollout_of_row.append(number)
    width = max(len(tree.ids) for tree in trees)

    def rows(values: Sequence[np.ndarray], fill: int) -> torch.Tensor:
        return torch.stack(
            [
                torch.nn.functional.pad(torch.from_numpy(each), (0, width - len(each)), value=fill)
                for each in values
            ]
        )

    ids = rows([tree.ids for tree in trees], 0)
    call_index = rows([tree.call for tree in trees], -1)[:, 1:]
    as_calls = agl_fast.build_batch(
        rollouts,
        level="transition",
        max_prompt_length=10_000,
        max_response_length=10_000,
        pad_token_id=0,
        trim=True,
    )
    tensors = {
        "prompts": ids[:, :1],
        "responses": ids[:, 1:],
        "input_ids": ids,
        "attention_mask": rows([np.ones_like(tree.ids) for tree in trees], 0),
        "position_ids": rows([tree.depths for tree in trees], 0),
        "response_mask": (call_index >= 0).long(),
        "call_index": call_index,
        "token_level_scores": torch.zeros(call_index.shape),
        "is_drop_mask": torch.zeros(len(trees), dtype=torch.bool),
    }
    columns = {
        "rollout_id_list": np.array([rollouts[n].rollout_id for n in rollout_of_row], object),
        "data_id_list": np.array([rollouts[n].data_id for n in rollout_of_row], object),
        "has_rollout_log_probs": np.zeros(len(trees), dtype=bool),
    }
    return replace(as_calls, tensors=tensors, columns=columns)


def _split(
    rollout: agl_fast.Rollout, max_tokens: int, merge_samples: bool
) -> list[tuple[int, SmallTree]]:
    """Each tree with the index of its first call."""
    calls = [(call.prompt_ids, call.response_ids) for call in rollout.calls]
    parts = []
    first = 0
    for behind in range(1, len(calls) + 1):
        grown = tree_of(calls[first:behind], merge_samples=merge_samples)
        if len(grown.ids) > max_tokens and behind > first + 1:
            first = behind - 1
            grown = tree_of(calls[first:behind], merge_samples=merge_samples)
        parts = [part for part in parts if part[0] != first] + [(first, grown)]
    return parts
