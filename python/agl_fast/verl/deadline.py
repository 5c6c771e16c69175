"""No wait may be endless."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

REPEAT_SECONDS = 5.0


@contextmanager
def deadline(what: str, seconds: float) -> Iterator[None]:
    """Raise TimeoutError when the block takes longer than `seconds`. Main thread only, no nesting.

    Most waits are inside verl and take no timeout. They end in Ray's `get` or an event loop, which
    both give way to a KeyboardInterrupt (and Ray to nothing else).
    """
    expired = False

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        nonlocal expired
        expired = True
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    # Again after a while, in case something catches the first interrupt and waits on.
    previous_timer = signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT_SECONDS)
    try:
        yield
    except KeyboardInterrupt:
        if not expired:
            raise
        raise TimeoutError(f"{what} did not finish within {seconds:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        # Somebody else's, as a test runner's time limit: it goes on with what it had left.
        signal.setitimer(signal.ITIMER_REAL, *previous_timer)
