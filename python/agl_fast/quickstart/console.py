"""What the user sees of a run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from agl_fast.verl.supervision.waits import deadline


class Console:
    """The user's terminal. Whatever else this process prints goes to `run_folder/driver.log`."""

    def __init__(self, run_folder: Path, *, verbose: bool) -> None:
        self.out: TextIO = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
        if not verbose:
            with open(run_folder / "driver.log", "w") as log:
                os.dup2(log.fileno(), sys.stdout.fileno())
                os.dup2(log.fileno(), sys.stderr.fileno())

    def say(self, text: str) -> None:
        print(text, file=self.out)

    @contextmanager
    def phase(self, what: str, seconds: float) -> Iterator[None]:
        """Announce `what`, give it `seconds` and say how long it took."""
        print(f"{what} ...", end="", file=self.out, flush=True)
        start = time.monotonic()
        try:
            with deadline(what, seconds):
                yield
        finally:
            print(f" {time.monotonic() - start:.1f} s", file=self.out)
