"""One PPO step of verl's RayPPOTrainer on a batch of rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from omegaconf import open_dict
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.debug.metrics import calculate_debug_metrics

import agl_fast
from agl_fast.batch.accounting import RolloutEntry

CORRELATION = "training/rollout_actor_probs_pearson_corr"
MIN_CORRELATION = 0.99

ROW_TENSORS = (
    "prompts",
    "responses",
    "input_ids",
    "attention_mask",
    "position_ids",
    "response_mask",
    "rollout_log_probs",
)


@dataclass(frozen=True)
class PpoStep:
    """What one step reports: the rollout/actor correlation and verl's actor metrics."""

    correlation: float
    actor_metrics: dict[str, float]


def group_advantages(rollouts: Sequence[RolloutEntry]) -> dict[str, float]:
    """GRPO: each rollout's reward against its group (same data_id), in units of the group's spread.

    The group counts rollouts, not rows: how many rows a rollout became changes no advantage.
    """
    groups: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.data_id].append(rollout.reward)
    return {
        rollout.rollout_id: float(
            (rollout.reward - np.mean(groups[rollout.data_id]))
            / (np.std(groups[rollout.data_id]) + 1e-6)
        )
        for rollout in rollouts
    }


def row_advantages(batch: agl_fast.Batch) -> torch.Tensor:
    """(B, R) float32: the rollout's advantage on every trained token of its rows."""
    of_rollout = group_advantages(batch.rollouts)
    per_row = [of_rollout[rollout_id] for rollout_id in batch.columns["rollout_id_list"]]
    return torch.tensor(per_row).unsqueeze(1) * batch.tensors["response_mask"]


class RowTrainer(RayPPOTrainer):
    """verl's trainer with a step that takes rows, in place of its rollout and reward loop."""

    def train_on(self, batch: agl_fast.Batch) -> PpoStep:
        """Recompute log-probs, compare them with the rollout's and take one PPO step.

        Raises:
            RuntimeError: rollout and actor disagree, so the servers do not hold the actor's weights.
        """
        rows = DataProto.from_dict(
            tensors={name: batch.tensors[name] for name in ROW_TENSORS},
            meta_info={
                "temperature": self.config.actor_rollout_ref.rollout.temperature,
                "global_token_num": batch.tensors["attention_mask"].sum(dim=1).tolist(),
            },
        )
        log_probs, _ = self._compute_old_log_prob(rows)
        log_probs.batch.pop("entropys")
        rows = rows.union(log_probs)
        correlation = self._require_same_policy(rows)

        rows.batch["advantages"] = row_advantages(batch)
        with open_dict(self.config):
            # The whole batch is one mini-batch: how many rows there are differs from step to step.
            self.config.actor_rollout_ref.actor.ppo_mini_batch_size = len(rows)
        metrics = self._update_actor(rows).meta_info["metrics"]
        return PpoStep(correlation, {name: float(np.mean(value)) for name, value in metrics.items()})

    def _require_same_policy(self, rows: DataProto) -> float:
        metrics = calculate_debug_metrics(rows)
        correlation = float(metrics[CORRELATION])
        # Also false for nan.
        if not correlation > MIN_CORRELATION:
            raise RuntimeError(
                f"correlation of rollout and actor probabilities is {correlation:.4f}, "
                f"expected more than {MIN_CORRELATION}: vLLM samples from other weights than "
                f"the actor's (largest difference {metrics['training/rollout_probs_diff_max']:.4f})"
            )
        return correlation
