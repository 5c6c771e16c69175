"""One PPO step of verl's RayPPOTrainer on a batch of rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from omegaconf import open_dict
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.debug.metrics import calculate_debug_metrics

import agl_fast
from agl_fast.verl.advantages import row_advantages

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
    """What one step reports.

    Attributes:
        correlation: of the probabilities that rollout and actor give the trained tokens.
        metrics: verl's actor metrics, averaged over its micro-batches.
    """

    correlation: float
    metrics: dict[str, float]


class RowTrainer(RayPPOTrainer):
    """verl's trainer with a step that takes rows, in place of its rollout and reward loops."""

    def train_on(self, batch: agl_fast.Batch) -> PpoStep:
        """Recompute log-probs, hold them against the rollout's, take one PPO step.

        Raises:
            RuntimeError: they disagree, so the servers do not hold the actor's weights.
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
        correlation = require_same_policy(rows)

        rows.batch["advantages"] = row_advantages(batch)
        with open_dict(self.config):
            # One mini-batch of all rows, whose number differs from step to step.
            self.config.actor_rollout_ref.actor.ppo_mini_batch_size = len(rows)
        metrics = self._update_actor(rows).meta_info["metrics"]
        return PpoStep(
            correlation, {name: float(np.mean(values)) for name, values in metrics.items()}
        )


def require_same_policy(rows: DataProto) -> float:
    """The correlation of rollout and actor probabilities; RuntimeError at 0.99 or less, or NaN."""
    metrics = calculate_debug_metrics(rows)
    correlation = float(metrics["training/rollout_actor_probs_pearson_corr"])
    if not correlation > MIN_CORRELATION:
        difference = metrics["training/rollout_probs_diff_max"]
        raise RuntimeError(
            f"rollout and actor probabilities correlate by {correlation:.4f}, expected more than "
            f"{MIN_CORRELATION} (largest difference {difference:.4f}): the servers do not hold "
            "the actor's weights"
        )
    return correlation
