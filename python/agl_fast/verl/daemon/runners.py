"""Which runners give no sign of life any more."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any


class SilentRunners:
    """Runners whose beats have stopped.

    Agent-lightning's runners beat every ten seconds, also while an agent works. Whether a beat is
    new is what counts, and for how long none was: clocks of other machines, and a machine that
    slept, do no harm.

    Args:
        seconds: without a beat for so long, a runner is silent. None: nobody asks.

    Attributes:
        are_all: every runner that was ever heard of is silent, and there is one.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.are_all = False
        self._beats: dict[str, tuple[float, float]] = {}

    def among(self, workers: Sequence[Any]) -> list[Any]:
        """Those of the store's workers that are silent. One that never beats is not judged."""
        if self.seconds is None:
            return []
        now = time.monotonic()
        silent = []
        for worker in workers:
            beat = worker.last_heartbeat_time
            if beat is None:
                continue
            known = self._beats.get(worker.worker_id)
            if known is None or known[0] != beat:
                self._beats[worker.worker_id] = known = (beat, now)
            if now - known[1] > self.seconds:
                silent.append(worker)
        self.are_all = bool(silent) and len(silent) == len(workers)
        return silent
