"""How much memory a run takes."""

from __future__ import annotations

import threading
from types import TracebackType

import psutil

SECONDS_BETWEEN_LOOKS = 0.5


class PeakMemory:
    """Watches, while it is entered, how far the machine's available memory falls.

    Shared memory counts, memory that processes share counts once, and so does whatever else the
    machine does meanwhile.

    Attributes:
        gib: the deepest fall so far.
    """

    def __init__(self) -> None:
        self.gib = 0.0
        self._before = psutil.virtual_memory().available
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_LOOKS):
            taken = self._before - psutil.virtual_memory().available
            self.gib = max(self.gib, taken / 2**30)
