"""What a run leaves behind: processes, and shared memory that none of them unlinked."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

import psutil

RUN_VARIABLE = "AGL_FAST_RUN"
SHARED_MEMORY = Path("/dev/shm")
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


def segments_of_run(run_id: str) -> set[str]:
    """Names of the segments that the run's living processes map."""
    pids = [process.pid for process in processes_of_run(run_id)]
    return mapped_segments(pids) & shared_memory_segments()


def unlink_segments(names: Collection[str]) -> list[str]:
    """Unlink those that no process maps any more; return what stays although it should not.

    A segment that somebody still maps has gone over to a program that lives on.
    """
    abandoned = shared_memory_segments().intersection(names) - mapped_segments()
    for name in abandoned:
        (SHARED_MEMORY / name).unlink(missing_ok=True)
    return sorted(abandoned & shared_memory_segments())


def mapped_segments(pids: Iterable[int] | None = None) -> set[str]:
    """Names of the segments that processes map; None: all living ones.

    Found by inode: a semaphore is mapped before it gets its name.
    """
    if not SHARED_MEMORY.is_dir():
        return set()
    all_maps = Path("/proc").glob("[0-9]*/maps")
    inodes = set()
    for maps in all_maps if pids is None else (Path(f"/proc/{pid}/maps") for pid in pids):
        try:
            text = maps.read_text()
        except OSError:
            continue  # ended meanwhile, or another user's
        inodes.update(re.findall(rf"(\d+) +{SHARED_MEMORY}/", text))
    return {entry.name for entry in os.scandir(SHARED_MEMORY) if str(entry.inode()) in inodes}
