"""What a run reports beside metrics: empty steps, and its last lines."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from omegaconf import DictConfig

import agl_fast
from agl_fast.training.checkpoints import last_checkpoint

logger = logging.getLogger(__name__)

KEY = "agentlightning.max_empty_steps"
_DIFFERENCE = "training/audit/prob_diff_mean"
_CORRELATION = "training/audit/prob_correlation"


class NothingTrainedError(RuntimeError):
    """A run ended without a single trained token."""


class EmptySteps:
    """Skip empty steps, and end the run after too many consecutive ones.

    Args:
        limit: maximum number of consecutive empty steps.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._consecutive = 0
        self._n_updates = 0
        self._last_empty: agl_fast.EmptyBatchError | None = None

    def count(self, empty: agl_fast.EmptyBatchError | None) -> dict[str, float]:
        """Count a step.

        Args:
            empty: why there was nothing to train; None after an update.

        Returns:
            `training/n_empty_steps`, 1 or 0.

        Raises:
            EmptyBatchError: `empty`, if the limit is exceeded.
        """
        self._consecutive = 0 if empty is None else self._consecutive + 1
        if empty is None:
            self._n_updates += 1
            return {"training/n_empty_steps": 0}
        self._last_empty = empty
        if self._consecutive > self._limit:
            if self._limit:
                logger.error("Ending the run after %d consecutive empty steps.", self._consecutive)
            raise empty
        logger.error(
            "%s. Skipping optimizer step: empty batch (%d consecutive, limit %s=%d).",
            empty,
            self._consecutive,
            KEY,
            self._limit,
        )
        return {"training/n_empty_steps": 1}

    def require_updates(self) -> None:
        """Raise an error if every step was empty.

        Raises:
            NothingTrainedError: no step has trained a token; the last step's error is the cause.
        """
        if self._last_empty is not None and not self._n_updates:
            raise NothingTrainedError(
                f"this run trained nothing: all {self._consecutive} steps were empty. The last "
                f"one: {self._last_empty}"
            ) from self._last_empty


def note_worst_audit(worst: dict[str, float], metrics: Mapping[str, float]) -> None:
    """Update the run's largest mean difference and smallest correlation with a step's metrics."""
    for name, choose in ((_DIFFERENCE, max), (_CORRELATION, min)):
        if name in metrics:
            worst[name] = choose(metrics[name], worst.get(name, metrics[name]))


def closing_lines(
    config: DictConfig, worst_audit: Mapping[str, float], failures: str | None
) -> Iterator[str]:
    """The last lines of a run: failures, worst audit, checkpoint, recordings.

    Args:
        config: the whole configuration.
        worst_audit: as kept by `note_worst_audit`.
        failures: sentence with the number of failed rollouts and the most common reason.
    """
    if failures:
        yield f"{failures}."
    if _DIFFERENCE in worst_audit:
        correlation = worst_audit.get(_CORRELATION)
        yield (
            "audit of the servers' probabilities against the actor's, worst step: mean difference "
            f"{worst_audit[_DIFFERENCE]:.2g}"
            + ("" if correlation is None else f", correlation {correlation:.4f}")
            + "."
        )
    if checkpoint := last_checkpoint(config.trainer.get("default_local_dir")):
        yield f"last checkpoint: {checkpoint}"
    if recordings := config.agentlightning.get("record_dir"):
        yield f"recordings: {Path(recordings).absolute()} (python -m agl_fast analyze FILE)"
