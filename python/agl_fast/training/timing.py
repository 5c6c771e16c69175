"""How long the parts of a step take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def timed(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Add the block's duration to ``seconds[name]``."""
    start = time.monotonic()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.monotonic() - start
