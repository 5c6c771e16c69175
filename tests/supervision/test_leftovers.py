"""What a run leaves behind is found and removed, and nothing else is."""

from __future__ import annotations

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


needs_shared_memory = pytest.mark.skipif(
    not leftovers.SHARED_MEMORY.is_dir(), reason="no /dev/shm here"
)


@needs_shared_memory
def test_segments_that_nobody_maps_are_unlinked_where_they_are_named() -> None:
    in_use = shared_memory.SharedMemory(create=True, size=64)
    abandoned, of_another = (shared_memory.SharedMemory(create=True, size=64) for _ in range(2))
    for segment in (abandoned, of_another):
        # Its unlinking is what is tested here.
        resource_tracker.unregister(f"/{segment.name}", "shared_memory")
        segment.close()
    try:
        assert leftovers.unlink_segments([in_use.name, abandoned.name, "psm_gone"]) == []
        assert {in_use.name, of_another.name} <= leftovers.shared_memory_segments()
        assert abandoned.name not in leftovers.shared_memory_segments()
    finally:
        in_use.close()
        in_use.unlink()
        (leftovers.SHARED_MEMORY / of_another.name).unlink()


@needs_shared_memory
def test_a_semaphore_in_use_stays() -> None:
    """The kernel knows it by another name: that of the file which was linked to its own."""
    in_use: Any = multiprocessing.get_context("spawn").Lock()
    name = f"sem.{in_use._semlock.name.removeprefix('/')}"
    assert name in leftovers.mapped_segments([os.getpid()])
    assert leftovers.unlink_segments([name]) == []
    assert name in leftovers.shared_memory_segments()
    del in_use  # unlinks it
