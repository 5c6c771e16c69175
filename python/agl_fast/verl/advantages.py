"""GRPO advantages from the table of rollouts, not from the rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

import agl_fast
from agl_fast.batch.accounting import RolloutEntry

# Keeps a group of equal rewards at advantage zero.
EPSILON = 1e-6


def group_advantages(rollouts: Sequence[RolloutEntry]) -> dict[str, float]:
    """Each rollout's reward against its group (same data_id), in units of the group's spread.

    A group counts rollouts: into how many rows a rollout fell changes no advantage.

    Returns:
        The advantage by rollout_id.
    """
    rewards: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        rewards[rollout.data_id].append(rollout.reward)
    mean = {data_id: float(np.mean(group)) for data_id, group in rewards.items()}
    spread = {data_id: float(np.std(group)) + EPSILON for data_id, group in rewards.items()}
    return {
        rollout.rollout_id: (rollout.reward - mean[rollout.data_id]) / spread[rollout.data_id]
        for rollout in rollouts
    }


def row_advantages(batch: agl_fast.Batch) -> torch.Tensor:
    """(B, R) float32: on every trained token the advantage of the row's rollout, 0 elsewhere."""
    of_rollout = group_advantages(batch.rollouts)
    per_row = [of_rollout[rollout_id] for rollout_id in batch.columns["rollout_id_list"]]
    return torch.tensor(per_row, dtype=torch.float32)[:, None] * batch.tensors["response_mask"]
