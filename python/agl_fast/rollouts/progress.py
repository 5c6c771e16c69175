"""Progress of rollouts: which have ended, which are overdue."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agl_fast.rollouts.finished import FinishedRollout
from agl_fast.rollouts.runners import FirstRunner, RunnerWatch

logger = logging.getLogger(__name__)

DEADLINE = "deadline"

_SHORTEST_PAUSE = 0.01
_LONGEST_PAUSE = 0.1
_SHORTEST_LOOK = 0.1
_LONGEST_LOOK = 5.0
_IDLE_SECONDS = 60.0  # between two warnings that nothing happens


@dataclass(frozen=True, slots=True)
class RolloutEnd:
    """The end of a rollout, before its calls are collected.

    Attributes:
        status: the store's, or ``DEADLINE``.
        queued_at, ended_at: seconds since the epoch.
    """

    rollout_id: str
    status: str
    queued_at: float
    ended_at: float


class Source(Protocol):
    """Runs the rollouts of one batch after another: a store, or the server of mode v0."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    # The id of the resources with the model's endpoint.
    async def set_up(self, model: str, temperature: float, policy_version: int) -> str: ...

    async def enqueue(self, requests: Sequence[Any]) -> list[Any]: ...

    # None: a runner of another run did it, and it is queued again.
    async def finished_rollout(
        self, end: RolloutEnd, sample: Mapping[str, Any]
    ) -> FinishedRollout | None: ...

    async def give_up(self, rollout_id: str) -> None: ...

    async def finished(self, rollout_ids: list[str]) -> list[Any]: ...

    async def rollout(self, rollout_id: str) -> Any: ...

    async def latest_attempt(self, rollout_id: str) -> Any | None: ...

    async def workers(self) -> list[Any]: ...

    # End of its last call, in seconds since the epoch.
    def last_call_at(self, rollout_id: str, attempt_id: str) -> float: ...

    async def give_up_attempt(self, rollout_id: str, attempt_id: str) -> None: ...

    async def cancel(self, rollout_id: str) -> None: ...


class PendingRollouts:
    """Wait for the enqueued rollouts of a batch.

    Args:
        rollouts: as the store returned them when they were enqueued.
        stale: ids of rollouts that an earlier batch gave up.
        seconds: a rollout that runs longer is cancelled. The wait ends with an error if for so long
            no rollout runs, begins or ends.
        runner_silent_seconds: an attempt is given up if its runner sends no heartbeat, or works on
            another one, for so long. None: never.
        first_runner: ends the wait with an error if no runner ever connects. None: only `seconds`
            applies.

    Attributes:
        counts: rollouts reported by the store and not waited for: ``stale``, of an earlier batch or
            reported twice, and ``unknown``; and ``foreign``, those taken back by `wait_again`.
    """

    def __init__(
        self,
        store: Source,
        rollouts: Sequence[Any],
        stale: set[str],
        seconds: float,
        runner_silent_seconds: float | None,
        first_runner: FirstRunner | None = None,
    ) -> None:
        self._store = store
        self._queued_at = {each.rollout_id: each.start_time for each in rollouts}
        self._running_since: dict[str, float] = {}
        self._attempts: dict[str, Any] = {}  # the latest known one of each running rollout
        self._given_up: set[str] = set()
        self._stale = set(stale)
        self._runners = RunnerWatch(runner_silent_seconds)
        self._first_runner = first_runner or FirstRunner(None)
        self._seconds = seconds
        self._look_seconds = min(max(seconds / 20, _SHORTEST_LOOK), _LONGEST_LOOK)
        self._next_look = self._moved_at = self._warned_at = time.monotonic()
        self.counts: Counter[str] = Counter()

    @property
    def rollout_ids(self) -> list[str]:
        return list(self._queued_at)

    def add(self, rollouts: Sequence[Any]) -> None:
        """Wait for further rollouts, too."""
        self._queued_at |= {each.rollout_id: each.start_time for each in rollouts}
        self._moved_at = time.monotonic()

    def forget(self, rollout_ids: Iterable[str]) -> None:
        """Do not wait for these rollouts any more."""
        for rollout_id in self._queued_at.keys() & set(rollout_ids):
            self._take(rollout_id, "cancelled", None)

    async def next_ends(self, wake: asyncio.Event | None = None) -> list[RolloutEnd]:
        """Wait until at least one rollout has ended.

        Args:
            wake: set: do not wait any longer, and return an empty list.

        Raises:
            TimeoutError: no runner takes the remaining rollouts.
            RuntimeError: the store failed.
        """
        pause = _SHORTEST_PAUSE
        while True:
            begin = time.monotonic()
            finished = await self._collect_finished() + await self._cancel_overdue()
            if finished:
                self._first_runner.seen = True
                self._moved_at = time.monotonic()
                return finished
            if wake is not None and wake.is_set():
                return []
            # Poll a slow store no faster than it answers.
            await asyncio.sleep(max(pause, time.monotonic() - begin))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def wait_again(self, end: RolloutEnd) -> None:
        """Wait for a rollout that was queued again."""
        self.counts["foreign"] += 1
        self._queued_at[end.rollout_id] = end.queued_at
        self._stale.discard(end.rollout_id)

    async def _collect_finished(self) -> list[RolloutEnd]:
        finished = []
        for rollout in await self._store.finished(self.rollout_ids):
            if rollout.rollout_id not in self._queued_at:
                kind = "stale" if rollout.rollout_id in self._stale else "unknown"
                self.counts[kind] += 1
                continue
            finished.append(self._take(rollout.rollout_id, rollout.status, rollout.end_time))
        return finished

    async def _cancel_overdue(self) -> list[RolloutEnd]:
        if time.monotonic() < self._next_look:
            return []
        await self._find_started()
        await self._give_up_abandoned_attempts()
        self._next_look = time.monotonic() + self._look_seconds
        now = time.time()
        overdue = [
            rollout_id
            for rollout_id, since in self._running_since.items()
            if now - since > self._seconds
        ]
        finished = []
        for rollout_id in overdue:
            await self._store.cancel(rollout_id)
            finished.append(self._take(rollout_id, DEADLINE, now))
        if not finished and self._queued_at:
            self._require_progress()
        return finished

    async def _find_started(self) -> None:
        for rollout_id in self.rollout_ids:
            if rollout_id not in self._running_since:
                rollout = await self._store.rollout(rollout_id)
                attempt = getattr(rollout, "attempt", None)
                if attempt is not None:
                    self._running_since[rollout_id] = attempt.start_time
                    self._attempts[rollout_id] = attempt
                    self._first_runner.seen = True
                    self._moved_at = time.monotonic()

    async def _give_up_abandoned_attempts(self) -> None:
        workers = await self._store.workers()
        if not workers:
            return
        self._first_runner.seen = True
        self._runners.look(workers)
        for rollout_id, attempt in list(self._attempts.items()):
            why = self._runners.abandoned_because(attempt)
            if why is None or self._calls_since(rollout_id, attempt):
                continue
            latest = await self._store.latest_attempt(rollout_id)
            if latest is not None and latest.attempt_id != attempt.attempt_id:
                self._attempts[rollout_id] = latest  # the store has retried it
            elif attempt.attempt_id not in self._given_up:
                self._given_up.add(attempt.attempt_id)
                logger.warning(
                    "Runner %s %s: its attempt at rollout %s is given up.",
                    attempt.worker_id,
                    why,
                    rollout_id,
                )
                await self._store.give_up_attempt(rollout_id, attempt.attempt_id)

    def _calls_since(self, rollout_id: str, attempt: Any) -> bool:
        """Whether its agent has made calls recently, although heartbeats are missing."""
        last = self._store.last_call_at(rollout_id, attempt.attempt_id)
        return time.time() - last < (self._runners.seconds or 0.0)

    def _require_progress(self) -> None:
        now = time.monotonic()
        still = now - self._moved_at
        n_running, n_left = len(self._attempts), len(self._queued_at)
        if min(still, now - self._warned_at) > _IDLE_SECONDS:
            self._warned_at = now
            logger.warning(
                "For %.0f s no rollout has begun or ended; %d run, %d wait for a runner. A rollout "
                "is cancelled after %g s.",
                still,
                n_running,
                n_left - n_running,
                self._seconds,
            )
        if n_running:
            return
        if self._runners.are_all_silent and still > (self._runners.seconds or 0.0):
            raise TimeoutError(
                f"no runner is left for {n_left} queued rollouts: none has sent a heartbeat for "
                f"{self._runners.seconds:g} s"
            )
        first = self._first_runner
        if first.seconds is not None and not first.seen and still > first.seconds:
            raise TimeoutError(
                f"no runner has asked for work in {first.seconds:g} s; {n_left} rollouts are "
                "queued. Start runners (agentlightning.Trainer(n_runners=…), or for a run of the "
                "command `python -m agl_fast join`), or wait longer for the first one: "
                "agentlightning.first_runner_seconds"
            )
        if still > self._seconds:
            raise TimeoutError(
                f"no runner took any of {n_left} queued rollouts within "
                f"{self._seconds:g} s: are there runners, and are they stuck in other rollouts?"
            )

    def _take(self, rollout_id: str, status: str, ended_at: float | None) -> RolloutEnd:
        self._attempts.pop(rollout_id, None)
        self._running_since.pop(rollout_id, None)
        queued_at = self._queued_at.pop(rollout_id)
        self._stale.add(rollout_id)
        return RolloutEnd(rollout_id, status, queued_at, ended_at or time.time())
