"""verl's trainer for the quickstart: rows in, one PPO step out."""

from __future__ import annotations

from dataclasses import dataclass

from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.debug.metrics import calculate_debug_metrics

import agl_fast
from agl_fast.verl.trainer.step import ppo_step
from agl_fast.verl.trainer.workers import WorkerGroups

MIN_CORRELATION = 0.99


@dataclass(frozen=True)
class RowStep:
    """What one step reports.

    Attributes:
        correlation: of the probabilities that rollout and actor give the trained tokens.
        metrics: of `ppo_step`.
    """

    correlation: float
    metrics: dict[str, float]


class RowTrainer(RayPPOTrainer):
    """verl's trainer with a step that takes rows, in place of its rollout and reward loops."""

    def train_on(self, batch: agl_fast.Batch, *, step: int) -> RowStep:
        """Take one PPO step.

        Raises:
            RuntimeError: rollout and actor disagree, so the servers do not hold the actor's
                weights.
        """
        workers = WorkerGroups(
            self.actor_rollout_wg, self._get_dp_size(self.actor_rollout_wg, "actor")
        )
        taken = ppo_step(
            batch, workers, self.config, n_rollouts=len(batch.rollouts), global_step=step
        )
        return RowStep(require_same_policy(taken.rows), taken.metrics)


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
