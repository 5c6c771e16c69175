"""Ctrl-C and SIGTERM end a run where it stands, so that it cleans up."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

# `timeout` sends SIGTERM to the process and to its group: twice. The second is no new wish.
_SAME_SECONDS = 10.0


class Interrupts:
    """What has interrupted the run.

    Attributes:
        terminated: whether it was SIGTERM.
    """

    def __init__(self) -> None:
        self.terminated = False
        self._terminated_at = 0.0
        self._is_heard = False
        self._previous: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """Take the signals, again after something else took them; main thread only."""
        if threading.current_thread() is not threading.main_thread():
            return
        # The first Ctrl-C only asks a running event loop to cancel its task, and ours stands still.
        self._take(signal.SIGINT, signal.default_int_handler)
        self._take(signal.SIGTERM, self._terminate)

    def _take(self, number: signal.Signals, handler: Any) -> None:
        before = signal.signal(number, handler)
        self._previous.setdefault(number, before)

    def _terminate(self, _number: int, _frame: FrameType | None) -> None:
        if self.terminated and time.monotonic() - self._terminated_at < _SAME_SECONDS:
            return
        self.terminated = True
        self._terminated_at = time.monotonic()
        raise KeyboardInterrupt  # Ray's waits give way to nothing else

    def end(self) -> None:
        """Give the signals back, and let a SIGTERM have the effect that it had before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if not self.terminated:
            return
        before = self._previous[signal.SIGTERM]
        if callable(before):
            before(signal.SIGTERM, None)
        sys.exit(128 + signal.SIGTERM)


@contextmanager
def interruptible() -> Iterator[Interrupts]:
    """Let Ctrl-C and SIGTERM end the block with KeyboardInterrupt.

    Raises:
        KeyboardInterrupt: Ctrl-C.
        SystemExit: SIGTERM, unless the handler that was there raises something else.
    """
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        logger.warning(
            "The run is not on the main thread, where alone it could be interrupted: a wait for a "
            "dead server or worker may not end. Agent-lightning's default strategy runs the "
            "algorithm on the main thread, 'shm' with main_thread='algorithm'."
        )
        yield interrupts
        return
    interrupts.listen()
    try:
        yield interrupts
    finally:
        interrupts.end()
