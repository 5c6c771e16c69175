"""The rollouts of one batch of samples, from enqueueing until all have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from agl_fast.rollouts.finished import Outcome
from agl_fast.rollouts.progress import Waiting
from agl_fast.rollouts.sources import Source

_PROGRESS_SECONDS = 10.0


class RunningBatch:
    """Takes what rollouts leave as soon as they end.

    Args:
        samples: what each rollout was enqueued with, by rollout id; among it its ``data_id``.

    Attributes:
        enqueued_at: seconds since the epoch.
    """

    def __init__(
        self,
        source: Source,
        waiting: Waiting,
        samples: Mapping[str, dict[str, Any]],
    ) -> None:
        self._source = source
        self._waiting = waiting
        self._samples = samples
        self._outcomes: dict[str, Outcome] = {}
        self._n_handed_out = 0
        self.enqueued_at = time.time()

    @property
    def running(self) -> list[str]:
        """Ids of rollouts that have not ended."""
        return [each for each in self._samples if each not in self._outcomes]

    @property
    def outcomes(self) -> list[Outcome]:
        """Of the rollouts that have ended, in the order in which they were enqueued."""
        return [self._outcomes[each] for each in self._samples if each in self._outcomes]

    @property
    def counts(self) -> dict[str, int]:
        """Rollouts that the store named although they are none of ours."""
        return {f"{name}_rollouts": count for name, count in self._waiting.counts.items()}

    async def collect(self, take: Callable[[Outcome], None], *, verbose: bool) -> None:
        """Wait until every rollout has ended.

        Args:
            take: gets the outcomes in the order in which the rollouts were enqueued, each as soon
                as those before it are there: which rollout was faster decides nothing.
        """
        said_at = time.monotonic()
        while self._waiting.rollout_ids:
            for finished in await self._waiting.next_finished():
                sample = self._samples[finished.rollout_id]
                outcome = await self._source.outcome(finished, sample)
                if outcome is None:
                    self._waiting.again(finished)
                    continue
                self._outcomes[finished.rollout_id] = outcome
            self._hand_out(take)
            if verbose and time.monotonic() - said_at > _PROGRESS_SECONDS:
                said_at = time.monotonic()
                print(f"agl_fast: {len(self._outcomes)}/{len(self._samples)} rollouts finished")

    async def cancel(self) -> None:
        """Give up what has not ended."""
        for rollout_id in self._waiting.rollout_ids:
            await self._source.give_up(rollout_id)

    def _hand_out(self, take: Callable[[Outcome], None]) -> None:
        for rollout_id in list(self._samples)[self._n_handed_out :]:
            if rollout_id not in self._outcomes:
                break
            take(self._outcomes[rollout_id])
            self._n_handed_out += 1
