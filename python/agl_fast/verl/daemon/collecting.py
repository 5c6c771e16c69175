"""The rollouts of one batch of samples, from enqueueing until all have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from agl_fast.verl.daemon.call_filter import CallFilter
from agl_fast.verl.daemon.outcomes import SUCCEEDED, Outcome
from agl_fast.verl.daemon.rewards import assign_rewards
from agl_fast.verl.daemon.store_access import StoreAccess
from agl_fast.verl.daemon.waiting import Finished, Waiting
from agl_fast.verl.proxy import Recorder

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
        store: StoreAccess,
        recorder: Recorder,
        call_filter: CallFilter | None,
        waiting: Waiting,
        samples: Mapping[str, dict[str, Any]],
    ) -> None:
        self._store = store
        self._recorder = recorder
        self._call_filter = call_filter
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
                self._outcomes[finished.rollout_id] = await self._outcome(finished)
            self._hand_out(take)
            if verbose and time.monotonic() - said_at > _PROGRESS_SECONDS:
                said_at = time.monotonic()
                print(f"agl_fast: {len(self._outcomes)}/{len(self._samples)} rollouts finished")

    async def cancel(self) -> None:
        """Cancel in the store what has not ended."""
        for rollout_id in self._waiting.rollout_ids:
            await self._store.cancel(rollout_id)
            self._recorder.discard(rollout_id)

    def _hand_out(self, take: Callable[[Outcome], None]) -> None:
        for rollout_id in list(self._samples)[self._n_handed_out :]:
            if rollout_id not in self._outcomes:
                break
            take(self._outcomes[rollout_id])
            self._n_handed_out += 1

    async def _outcome(self, finished: Finished) -> Outcome:
        rollout_id = finished.rollout_id
        sample = self._samples[rollout_id]
        attempt = await self._store.latest_attempt(rollout_id)
        if attempt is None:  # cancelled before anyone began it
            return Outcome(rollout_id, sample["data_id"], sample, finished.status, [], None)
        calls = self._recorder.take(rollout_id, attempt.attempt_id)
        self._recorder.discard(rollout_id)
        spans = await self._store.spans(rollout_id, attempt.attempt_id)
        reward = assign_rewards(spans, calls)
        # Only a whole trace can be held against the calls.
        if self._call_filter is not None and finished.status == SUCCEEDED:
            self._call_filter.apply(rollout_id, spans, calls)
        # "failed" says less than what the attempt came to: timeout or unresponsive.
        status = attempt.status if finished.status == "failed" else finished.status
        return Outcome(
            rollout_id,
            sample["data_id"],
            sample,
            status,
            [each.call for each in calls],
            reward,
            attempt.sequence_id - 1,
            attempt.start_time - finished.queued_at,
            finished.ended_at - attempt.start_time,
        )
