"""What a run leaves behind is found and removed, and nothing else is."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing import resource_tracker, shared_memory
from typing import Any
from uuid import uuid4

import pytest

pytest.importorskip("psutil", reason="needs the extra [cpu]")

from agl_fast.verl.supervision import leftovers


def test_processes_of_a_run_are_found_by_their_environment_and_ended() -> None:
    run_id = uuid4().hex
    nap = [sys.executable, "-c", "import time; time.sleep(600)"]
    ours = subprocess.Popen(nap, env={**os.environ, leftovers.RUN_VARIABLE: run_id})
    others = subprocess.Popen(nap, env={**os.environ, leftovers.RUN_VARIABLE: uuid4().hex})
    try:
        while not leftovers.processes_of_run(run_id):
            time.sleep(0.01)
        assert [process.pid for process in leftovers.processes_of_run(run_id)] == [ours.pid]
        assert leftovers.stop_processes_of_run(run_id, grace_seconds=0.2) == []
        assert ours.poll() is not None
        assert others.poll() is None
    finally:
        for process in (ours, others):
            process.kill()
            process.wait()


@pytest.mark.skipif(not leftovers.SHARED_MEMORY.is_dir(), reason="no /dev/shm here")
def test_only_new_and_unmapped_segments_are_unlinked() -> None:
    before = leftovers.shared_memory_segments()
    in_use = shared_memory.SharedMemory(create=True, size=64)
    abandoned = shared_memory.SharedMemory(create=True, size=64)
    # Its unlinking is what is tested here.
    resource_tracker.unregister(f"/{abandoned.name}", "shared_memory")
    abandoned.close()
    try:
        assert {in_use.name, abandoned.name} <= leftovers.shared_memory_segments() - before
        leftovers.unlink_abandoned_segments(before)
        assert in_use.name in leftovers.shared_memory_segments()
        assert abandoned.name not in leftovers.shared_memory_segments()
    finally:
        in_use.close()
        in_use.unlink()


@pytest.mark.skipif(not leftovers.SHARED_MEMORY.is_dir(), reason="no /dev/shm here")
def test_a_semaphore_in_use_stays() -> None:
    """The kernel knows it by another name: that of the file which was linked to its own."""
    before = leftovers.shared_memory_segments()
    in_use: Any = multiprocessing.get_context("spawn").Lock()
    name = f"sem.{in_use._semlock.name.removeprefix('/')}"
    assert name in leftovers.shared_memory_segments() - before
    leftovers.unlink_abandoned_segments(before)
    assert name in leftovers.shared_memory_segments()
    del in_use  # unlinks it


@pytest.mark.skipif(not leftovers.SHARED_MEMORY.is_dir(), reason="no /dev/shm here")
def test_a_segment_that_another_run_is_making_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """It exists before it is mapped."""
    before = leftovers.shared_memory_segments()
    path = leftovers.SHARED_MEMORY / f"psm_{uuid4().hex[:8]}"
    path.write_bytes(bytes(4096))
    made: list[mmap.mmap] = []

    def map_it(_: float) -> None:
        with path.open("r+b") as file:
            made.append(mmap.mmap(file.fileno(), 0))

    monkeypatch.setattr(leftovers.time, "sleep", map_it)
    try:
        assert leftovers.unlink_abandoned_segments(before) == []
        assert path.exists()
        made[0].close()
        monkeypatch.undo()
        leftovers.unlink_abandoned_segments(before)
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)
