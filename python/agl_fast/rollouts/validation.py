"""Validation metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agl_fast.rollouts.finished import FinishedRollout
from agl_fast.rows.calls import originals
from agl_fast.rows.rewards import final_reward, read_rewards


@dataclass(frozen=True, slots=True)
class ValidatedRollout:
    """One validation rollout.

    Attributes:
        data_source: of its sample, if it has one.
        reward: the fill value if ``has_reward`` is False.
        response_lengths: tokens of each trainable call without duplicates, in order.
        failed: the rollout did not succeed.
    """

    data_source: str | None
    reward: float
    has_reward: bool
    response_lengths: tuple[int, ...]
    failed: bool

    @classmethod
    def of(cls, rollout: FinishedRollout, reward_fillna_value: float) -> ValidatedRollout:
        """
        Raises:
            TypeError, ValueError: a reward is not a finite number; the message names it.
        """
        source = rollout.sample.get("data_source")
        rewards = read_rewards(rollout.rollout_id, rollout.calls)
        reward = final_reward(rollout.rollout_id, rollout.reward, rewards)
        return cls(
            None if source is None else str(source),
            reward_fillna_value if reward is None else reward,
            reward is not None,
            tuple(
                len(call.response_ids)
                for index, (call, original) in enumerate(
                    zip(rollout.calls, originals(rollout.calls), strict=True)
                )
                if call.trainable and index == original
            ),
            rollout.failed,
        )


def validation_metrics(rollouts: Sequence[ValidatedRollout]) -> dict[str, float]:
    """``val/*`` over all rollouts, and ``val/{data_source}/*`` over those of each data source.

    Args:
        rollouts: of one or more batches; each counts once.

    Raises:
        ValueError: there are no rollouts.
    """
    if not rollouts:
        raise ValueError("no validation rollouts")
    metrics = _metrics("val", rollouts)
    for source in sorted({each.data_source for each in rollouts if each.data_source is not None}):
        of_source = [each for each in rollouts if each.data_source == source]
        metrics |= _metrics(f"val/{source}", of_source)
    return metrics


def _metrics(prefix: str, rollouts: Sequence[ValidatedRollout]) -> dict[str, float]:
    metrics: dict[str, float] = {
        f"{prefix}/n_rollouts": len(rollouts),
        f"{prefix}/n_rollouts_w_trace": sum(bool(each.response_lengths) for each in rollouts),
        f"{prefix}/n_rollouts_w_reward": sum(each.has_reward for each in rollouts),
        f"{prefix}/n_rollouts_failed": sum(each.failed for each in rollouts),
        f"{prefix}/reward": float(np.mean([each.reward for each in rollouts])),
    }
    traces = [each.response_lengths for each in rollouts if each.response_lengths]
    if traces:
        metrics |= {
            f"{prefix}/mean_response_length": float(np.mean([np.mean(each) for each in traces])),
            f"{prefix}/sum_response_length": float(np.mean([sum(each) for each in traces])),
            f"{prefix}/turn_count": float(np.mean([len(each) for each in traces])),
        }
    return metrics
