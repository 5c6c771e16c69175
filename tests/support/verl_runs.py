"""Starts verl_run.py, and says what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agl_fast.verl.supervision import leftovers
from support.paths import SUPPORT
from support.verl_environment import ENVIRONMENT

TIMEOUT_SECONDS = 1200
SCRIPT = SUPPORT.joinpath("verl_run.py")


@dataclass(frozen=True)
class Finished:
    returncode: int
    output: str
    segments_left: set[str]
    processes_left: list[str]


def run(folder: Path, *arguments: str, **further: str) -> Finished:
    segments = leftovers.shared_memory_segments()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    mark = f"AGL_FAST_TEST={folder}"
    started = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder), "--port", str(port), *arguments],
        env=environment(folder, **further),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches a whole group of processes
    )
    ask_to_end = threading.Timer(TIMEOUT_SECONDS - 120, started.send_signal, [signal.SIGINT])
    ask_to_end.start()
    try:
        output, _ = started.communicate()
    finally:
        ask_to_end.cancel()
        if started.poll() is None:  # pytest is interrupted
            started.send_signal(signal.SIGINT)
            started.communicate(timeout=120)
    return Finished(
        started.returncode,
        output,
        abandoned_segments(segments),
        processes_marked(mark),
    )


def abandoned_segments(before: set[str]) -> set[str]:
    """Those since `before`. One that somebody maps belongs to another run: ours has ended."""
    abandoned = leftovers.shared_memory_segments() - before - leftovers.mapped_segments()
    return abandoned & leftovers.shared_memory_segments()


def environment(folder: Path, **further: str) -> dict[str, str]:
    inherited = dict(os.environ)
    # Many processes import the same packages: let them keep what the first one compiled.
    inherited.pop("PYTHONDONTWRITEBYTECODE", None)
    inherited.pop("VERL_PLATFORM", None)  # as at a user's: VERL chooses
    return inherited | ENVIRONMENT | {"AGL_FAST_TEST": str(folder)} | further


def processes_marked(mark: str) -> list[str]:
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environment.read_bytes():
                found.append((environment.parent / "comm").read_text())
        except OSError:
            continue  # ended meanwhile
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_nothing_left(finished: Finished) -> None:
    assert finished.processes_left == []
    assert finished.segments_left == set()
