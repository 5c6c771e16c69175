"""The process of a run: environment variables, and what the terminal shows."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from agl_fast.verl.supervision.waits import deadline

ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
CPU_ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # The actor and the vLLM server take turns on the same cores.
    "OMP_NUM_THREADS": "1",
}


def model_and_device(parser: argparse.ArgumentParser) -> tuple[str | None, str]:
    """Read MODEL (None: create a tiny model) and DEVICE; exit with a message if invalid."""
    model, device = os.environ.get("MODEL"), os.environ.get("DEVICE", "cpu")
    if device not in ("cpu", "cuda"):
        parser.error(f"DEVICE={device}: expected cpu or cuda")
    if device == "cuda" and model is None:
        parser.error("DEVICE=cuda: expected MODEL=name-or-folder as well")
    return model, device


def set_environment(run_folder: Path, device: str) -> None:
    """Set the variables that verl, Ray and vLLM read when they are imported."""
    os.environ.update(ENVIRONMENT | (CPU_ENVIRONMENT if device == "cpu" else {}))
    os.environ["VERL_FILE_LOGGER_PATH"] = str(run_folder / "metrics.jsonl")


class Console:
    """The terminal. All other output of this process goes to `run_folder/driver.log`."""

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
        """Print the name and duration of a phase, which may take `seconds` at most."""
        print(f"{what} ...", end="", file=self.out, flush=True)
        start = time.monotonic()
        try:
            with deadline(what, seconds):
                yield
        finally:
            print(f" {time.monotonic() - start:.1f} s", file=self.out)
