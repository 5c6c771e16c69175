"""No wait may be endless."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

REPEAT_SECONDS = 5.0


@dataclass(frozen=True)
class Limit:
    """The longest that a wait may take.

    Attributes:
        seconds: above 0.
        key: of the configuration, that sets it; errors name it.
    """

    seconds: float
    key: str | None = None

    def __str__(self) -> str:
        return f"{self.seconds:g} s" + (f" ({self.key})" if self.key else "")


@contextmanager
def deadline(what: str, limit: Limit | float) -> Iterator[None]:
    """Raise TimeoutError when the block takes longer. Main thread only, no nesting.

    Most waits are inside verl and take no timeout. They end in Ray's `get` or an event loop, which
    both give way to a KeyboardInterrupt (and Ray to nothing else).

    Args:
        what: names the block in the error.
        limit: a limit of the configuration, which the error names, or seconds.
    """
    expired = False
    if not isinstance(limit, Limit):
        limit = Limit(limit)

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        nonlocal expired
        expired = True
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    # Again after a while, in case something catches the first interrupt and waits on.
    previous_timer = signal.setitimer(signal.ITIMER_REAL, limit.seconds, REPEAT_SECONDS)
    try:
        yield
    except KeyboardInterrupt:
        if not expired:
            raise
        raise TimeoutError(f"{what} did not finish within {limit}") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        # Somebody else's, as a test runner's time limit: it goes on with what it had left.
        signal.setitimer(signal.ITIMER_REAL, *previous_timer)
