"""The numbers that verl and Agent-lightning log about a step's rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from verl import DataProto
from verl.trainer.ppo.metric_utils import compute_data_metrics


def data_metrics(
    tensors: Mapping[str, torch.Tensor], *, use_critic: bool, suffix: str
) -> dict[str, float]:
    """verl's numbers about scores, rewards, advantages, returns and lengths, each with `suffix`.

    Args:
        tensors: (B, …) of the rows, with token_level_scores, token_level_rewards, advantages and
            returns, and with values where there is a critic.
        suffix: `_before_processing` for all rows, `_after_processing` for those that are trained.
    """
    rows = DataProto.from_dict(tensors=dict(tensors))
    found = compute_data_metrics(rows, use_critic=use_critic)
    return {f"{name}{suffix}": float(value) for name, value in found.items()}


def in_all_rows(
    kept: torch.Tensor, values: Mapping[str, torch.Tensor], keys: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """Values of the kept rows among all rows, 0 on the others.

    Args:
        kept: (B,) bool.
        values: by name, (kept rows, R) each.
        keys: those to take, if they are there.
    """
    placed = {}
    for key in keys:
        if key in values:
            placed[key] = values[key].new_zeros(len(kept), values[key].shape[1])
            placed[key][kept] = values[key]
    return placed
