"""What one update costs at each level, on the same calls."""

from __future__ import annotations

from pathlib import Path

from agl_fast.rows.levels import LEVELS, LevelName
from agl_fast.tools.replay import replay

# The first update of a process is slower than all others.
ROUNDS = 3


def update_seconds(run_folder: Path) -> dict[LevelName, float]:
    """Take the first step again, at each level in turn, in this process.

    The first, as it begins with the weights that are there.

    Returns:
        Seconds of the actor's forward and backward passes and optimiser steps, the least of
        `ROUNDS`.
    """
    recording = min(run_folder.glob("recordings/*/train-*.jsonl.gz"))
    rounds = [
        {level: _update_seconds(recording, run_folder / "model", level) for level in LEVELS}
        for _ in range(ROUNDS)
    ]
    return {level: min(each[level] for each in rounds) for level in LEVELS}


def _update_seconds(recording: Path, model: Path, level: LevelName) -> float:
    settings = {"agentlightning": {"trace_aggregator": {"level": level}}}
    return replay(recording, settings, model=model).seconds["update_actor"]
