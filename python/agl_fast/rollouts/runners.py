"""Detection of dead runners and abandoned attempts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class FirstRunner:
    """How long a run waits for its first runner.

    Attributes:
        seconds: the limit; None: no separate limit.
        seen: a runner has connected.
    """

    seconds: float | None
    seen: bool = False


class RunnerWatch:
    """Find runners without heartbeats, and attempts that no runner works on.

    Agent-lightning's runners send a heartbeat every ten seconds, also while an agent works, and
    work on one attempt at a time. Times are measured when a heartbeat or a change is observed here,
    so clocks of other machines, and suspended machines, do no harm.

    Heartbeats alone are not enough: two processes may share a worker name, and the living one's
    heartbeats hide the death of the other. So an attempt also counts as abandoned once its runner
    works on something else.

    Args:
        seconds: a runner without a heartbeat for so long is silent; one that works on something
            else for so long has abandoned its attempt. None: no detection.

    Attributes:
        are_all_silent: there are runners, and all of them are silent.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.are_all_silent = False
        self._beats: dict[str, tuple[float, float]] = {}
        self._workers: dict[str, Any] = {}
        self._silent: set[str] = set()
        self._elsewhere_since: dict[str, float] = {}

    def look(self, workers: Sequence[Any]) -> None:
        """Update from the store's workers. One that never sent a heartbeat is never silent."""
        now = time.monotonic()
        self._workers = {worker.worker_id: worker for worker in workers}
        self._silent = {
            worker_id
            for worker_id, worker in self._workers.items()
            if self._silence(worker, now) > (self.seconds or float("inf"))
        }
        self.are_all_silent = bool(workers) and len(self._silent) == len(self._workers)

    def abandoned_because(self, attempt: Any) -> str | None:
        """Why an attempt counts as abandoned; None if its runner may still work on it."""
        worker = self._workers.get(attempt.worker_id)
        if self.seconds is None or worker is None:
            return None
        works_on_it = worker.current_attempt_id == attempt.attempt_id and worker.status != "idle"
        now = time.monotonic()
        if works_on_it:
            self._elsewhere_since.pop(attempt.attempt_id, None)
            if worker.worker_id in self._silent:
                return f"has sent no heartbeat for {self.seconds:g} s"
        elif now - self._elsewhere_since.setdefault(attempt.attempt_id, now) > self.seconds:
            return f"has been idle or in another rollout for {self.seconds:g} s"
        return None

    def _silence(self, worker: Any, now: float) -> float:
        beat = worker.last_heartbeat_time
        if beat is None:
            return 0.0
        known = self._beats.get(worker.worker_id)
        if known is None or known[0] != beat:
            self._beats[worker.worker_id] = known = (beat, now)
        return now - known[1]
