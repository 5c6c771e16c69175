"""Steps that leave nothing to train on."""

from __future__ import annotations

import logging

import agl_fast

logger = logging.getLogger(__name__)

KEY = "agentlightning.max_empty_steps"


class NothingTrainedError(RuntimeError):
    """A run ended without having trained a single token."""


class EmptySteps:
    """Lets a run skip them, and ends it when too many come one after another.

    Args:
        limit: how many in a row are skipped.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_a_row = 0
        self._n_learned = 0
        self._last_empty: agl_fast.EmptyBatchError | None = None

    def count(self, empty: agl_fast.EmptyBatchError | None) -> dict[str, float]:
        """Take note of a step.

        Args:
            empty: why there was nothing to train on; None: there was something.

        Returns:
            `training/n_empty_steps`, 1 or 0.

        Raises:
            EmptyBatchError: `empty`, which is one too many.
        """
        self._in_a_row = 0 if empty is None else self._in_a_row + 1
        if empty is None:
            self._n_learned += 1
            return {"training/n_empty_steps": 0}
        self._last_empty = empty
        if self._in_a_row > self._limit:
            if self._limit:
                logger.error("The run ends after %d empty steps in a row.", self._in_a_row)
            raise empty
        logger.error(
            "%s. Nothing is learned in this step, the %d. of at most %s=%d in a row.",
            empty,
            self._in_a_row,
            KEY,
            self._limit,
        )
        return {"training/n_empty_steps": 1}

    def require_learning(self) -> None:
        """End the run with an error where every step was empty.

        Raises:
            NothingTrainedError: no step has trained a token; the last one's reason is the cause.
        """
        if self._last_empty is not None and not self._n_learned:
            raise NothingTrainedError(
                f"this run trained nothing: all {self._in_a_row} steps were empty. The last one: "
                f"{self._last_empty}"
            ) from self._last_empty
