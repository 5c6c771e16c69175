"""A wrong batch of trees: a token that was sampled twice in the same place is in it once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

import agl_fast
from small_trees import tree_of


def merged_samples(batch: agl_fast.Batch, rollouts: Sequence[agl_fast.Rollout]) -> agl_fast.Batch:
    """One row a rollout, its prompt one token wide."""
    trees = [
        tree_of(
            [(call.prompt_ids, call.response_ids) for call in rollout.calls], merge_samples=True
        )
        for rollout in rollouts
    ]
    width = max(len(tree.ids) for tree in trees)

    def rows(values: Sequence[np.ndarray], fill: int) -> torch.Tensor:
        missing = [width - len(each) for each in values]
        return torch.stack(
            [
                torch.nn.functional.pad(torch.from_numpy(each), (0, n), value=fill)
                for each, n in zip(values, missing, strict=True)
            ]
        )

    ids = rows([tree.ids for tree in trees], 0)
    call_index = rows([tree.call for tree in trees], -1)[:, 1:]
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
        "rollout_id_list": np.array([each.rollout_id for each in rollouts], object),
        "data_id_list": np.array([each.data_id for each in rollouts], object),
        "has_rollout_log_probs": np.zeros(len(trees), dtype=bool),
    }
    return replace(batch, tensors=tensors, columns=columns)
