"""What a run leaves behind: processes, and shared memory that none of them unlinked."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import psutil

RUN_VARIABLE = "AGL_FAST_RUN"
SHARED_MEMORY = Path("/dev/shm")
_MAPPED_SECONDS = 0.5  # from making a segment to mapping it, on a busy machine
# Python's SharedMemory (vLLM's message queues) and semaphores, verl's weight buckets.
SEGMENT = re.compile(r"(psm_|sem\.mp-|verl_weights_)\w+")


def processes_of_run(run_id: str) -> list[psutil.Process]:
    """Living processes, this one excepted, whose environment carries `RUN_VARIABLE=run_id`.

    Ray's processes get it, and theirs (vLLM's among them) inherit it, whatever became of their
    parents.
    """
    found = []
    for process in psutil.process_iter():
        try:
            carries_run = process.environ().get(RUN_VARIABLE) == run_id
            if carries_run and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # ended meanwhile, or another user's
    return [process for process in found if process.pid != os.getpid()]


def stop_processes_of_run(run_id: str, *, grace_seconds: float = 10.0) -> list[str]:
    """Wait for the run's processes to end by themselves, then end them.

    Returns:
        Those that are still there, as "pid name".
    """
    _, running = psutil.wait_procs(processes_of_run(run_id), timeout=grace_seconds)
    for process in running:
        process.terminate()
    _, running = psutil.wait_procs(running, timeout=grace_seconds)
    for process in running:
        process.kill()
    psutil.wait_procs(running, timeout=grace_seconds)
    return [f"{process.pid} {process.name()}" for process in processes_of_run(run_id)]


def shared_memory_segments() -> set[str]:
    """Names of this user's segments that vLLM's or verl's naming fits."""
    if not SHARED_MEMORY.is_dir():
        return set()
    return {
        entry.name
        for entry in os.scandir(SHARED_MEMORY)
        if SEGMENT.fullmatch(entry.name) and entry.stat().st_uid == os.getuid()
    }


def unlink_abandoned_segments(before: set[str]) -> list[str]:
    """Unlink segments that are new since `before` and that no process maps; return what stays.

    A segment that somebody maps belongs to another run: ours have ended by now. One that another
    run makes at this moment is mapped a moment later.
    """
    abandoned = shared_memory_segments() - before - mapped_segments()
    if abandoned:
        time.sleep(_MAPPED_SECONDS)
        abandoned -= mapped_segments()
    for name in abandoned:
        (SHARED_MEMORY / name).unlink(missing_ok=True)
    return sorted(abandoned & shared_memory_segments())


def mapped_segments() -> set[str]:
    """Names of all segments that living processes map.

    Found by inode: a semaphore is mapped before it gets its name.
    """
    inodes = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text()
        except OSError:
            continue  # ended meanwhile, or another user's
        inodes.update(re.findall(rf"(\d+) +{SHARED_MEMORY}/", text))
    if not SHARED_MEMORY.is_dir():
        return set()
    return {entry.name for entry in os.scandir(SHARED_MEMORY) if str(entry.inode()) in inodes}
