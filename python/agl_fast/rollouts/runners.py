"""Which runners live, and which have left their attempts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class FirstRunner:
    """How long a run waits for its first runner.

    Attributes:
        seconds: the limit; None: there is none of its own.
        seen: whether a runner has asked for work.
    """

    seconds: float | None
    seen: bool = False


class RunnerWatch:
    """Runners whose beats have stopped, and attempts that nobody works on.

    Agent-lightning's runners beat every ten seconds, also while an agent works, and work on one
    attempt at a time. What counts is when a beat or a change was seen here, so clocks of other
    machines, and a machine that slept, do no harm.

    Beats alone do not tell: two processes may have one worker name, and the beats of the living one
    cover for the dead. An attempt is also left once its runner has asked for other work.

    Args:
        seconds: without a beat for so long, a runner is silent; after so long elsewhere, it has
            left its attempt. None: nothing is judged.

    Attributes:
        are_all_silent: every runner that was ever heard of is silent, and there is one.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.are_all_silent = False
        self._beats: dict[str, tuple[float, float]] = {}
        self._workers: dict[str, Any] = {}
        self._silent: set[str] = set()
        self._elsewhere_since: dict[str, float] = {}

    def look(self, workers: Sequence[Any]) -> None:
        """Take in the store's workers. One that never beats is never silent."""
        now = time.monotonic()
        self._workers = {worker.worker_id: worker for worker in workers}
        self._silent = {
            worker_id
            for worker_id, worker in self._workers.items()
            if self._silence(worker, now) > (self.seconds or float("inf"))
        }
        self.are_all_silent = bool(workers) and len(self._silent) == len(self._workers)

    def why_left(self, attempt: Any) -> str | None:
        """Why nobody works on the running attempt; None: its runner may."""
        worker = self._workers.get(attempt.worker_id)
        if self.seconds is None or worker is None:
            return None
        is_there = worker.current_attempt_id == attempt.attempt_id and worker.status != "idle"
        now = time.monotonic()
        if is_there:
            self._elsewhere_since.pop(attempt.attempt_id, None)
            if worker.worker_id in self._silent:
                return f"has given no sign of life for {self.seconds:g} s"
        elif now - self._elsewhere_since.setdefault(attempt.attempt_id, now) > self.seconds:
            return f"has been without it, idle or in another rollout, for {self.seconds:g} s"
        return None

    def _silence(self, worker: Any, now: float) -> float:
        beat = worker.last_heartbeat_time
        if beat is None:
            return 0.0
        known = self._beats.get(worker.worker_id)
        if known is None or known[0] != beat:
            self._beats[worker.worker_id] = known = (beat, now)
        return now - known[1]
