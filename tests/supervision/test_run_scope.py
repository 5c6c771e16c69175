"""A run's end removes what is the run's, also after a kill, and nothing of anybody else."""

from __future__ import annotations

import functools
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

pytest.importorskip("psutil", reason="needs the extra [cpu]")

from agl_fast.verl.supervision import kept_logs, run_scope
from agl_fast.verl.supervision.leftovers import (
    RUN_VARIABLE,
    SHARED_MEMORY,
    processes_of_run,
    shared_memory_segments,
)
from agl_fast.verl.supervision.run_scope import RunScope, nothing_left_behind

NAP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stop = functools.partial(run_scope.stop_processes_of_run, grace_seconds=0.2)
    monkeypatch.setattr(run_scope, "stop_processes_of_run", lambda run_id, **_: stop(run_id))
    monkeypatch.setattr(kept_logs, "logs_folder", lambda: tmp_path / "kept")


@contextmanager
def ended(*processes: subprocess.Popen[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_only_what_ray_starts_is_marked_and_ended() -> None:
    """Not the user's processes, nor another run's."""
    of_other = subprocess.Popen(NAP, env={**os.environ, RUN_VARIABLE: "another run"})
    before = os.environ.get("TMPDIR")
    with nothing_left_behind() as scope:
        users = subprocess.Popen(NAP)
        with scope.environment():
            assert os.environ["TMPDIR"] == str(scope.folder)
            ours = subprocess.Popen(NAP)
        assert os.environ.get("TMPDIR") == before
        assert RUN_VARIABLE not in os.environ
        (scope.folder / "file").touch()
    with ended(users, of_other, ours):
        assert ours.poll() is not None
        assert users.poll() is None
        assert of_other.poll() is None
    assert not scope.folder.exists()


MAPPING = """
import mmap, sys, time
maps = []
for path in sys.argv[1:]:
    with open(path, "w+b") as file:
        file.truncate(4096)
        maps.append(mmap.mmap(file.fileno(), 0))
print("mapped", flush=True)
time.sleep(600)
"""


@contextmanager
def paths(n: int) -> Iterator[list[Path]]:
    """Of segments that do not exist yet."""
    found = [SHARED_MEMORY / f"psm_{uuid4().hex[:8]}" for _ in range(n)]
    try:
        yield found
    finally:
        for path in found:
            path.unlink(missing_ok=True)


def mapping(*segments: Path) -> subprocess.Popen[str]:
    """A process that makes and maps them."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAPPING, *map(str, segments)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "mapped\n"
    return process


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no /dev/shm here")
def test_shared_memory_that_the_run_s_processes_did_not_map_stays() -> None:
    """Whoever made it meanwhile may have closed it, and not have handed it on yet."""
    with paths(3) as (ours, others, handed_over):
        before = shared_memory.SharedMemory(create=True, size=64)
        with nothing_left_behind() as scope:
            with scope.environment():
                process = mapping(ours, handed_over)
            others.write_bytes(bytes(64))  # of another program, at this moment in nobody's hands
            scope.note_segments()
            process.kill()
            process.wait()
            with handed_over.open("r+b") as file:
                in_use = mmap.mmap(file.fileno(), 0)
        assert not ours.exists()
        assert others.exists()
        assert handed_over.exists()
        assert before.name in shared_memory_segments()
        in_use.close()
        before.close()
        before.unlink()


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no /dev/shm here")
def test_what_processes_map_when_the_run_ends_is_removed_with_them() -> None:
    with paths(1) as (ours,), nothing_left_behind() as scope:
        with scope.environment():
            process = mapping(ours)
        with ended(process):
            left, _ = scope.clean_up(failed=False)
        assert left == []
        assert not ours.exists()
        scope.note_segments()  # of the reaper, after the folder is gone


def ray_session(scope: RunScope, **files: bytes) -> None:
    logs = scope.folder / "session_1" / "logs"
    logs.mkdir(parents=True)
    for name, content in files.items():
        (logs / name).write_bytes(content)
    (scope.folder / "session_latest").symlink_to(scope.folder / "session_1")


def test_a_failed_run_keeps_ray_s_logs_and_says_where(tmp_path: Path) -> None:
    scopes: list[RunScope] = []

    def run() -> None:
        with nothing_left_behind() as scope:
            scopes.append(scope)
            ray_session(scope, worker=b"a CUDA error", empty=b"")
            raise ValueError("of a worker")

    with pytest.raises(ValueError, match="of a worker") as raised:
        run()
    (kept,) = (tmp_path / "kept").iterdir()
    assert [path.name for path in kept.rglob("*") if path.is_file()] == ["worker"]
    assert (kept / "session_1" / "logs" / "worker").read_bytes() == b"a CUDA error"
    if sys.version_info >= (3, 11):
        (said,) = raised.value.__notes__
        assert said == f"Ray's logs, with the output of every worker, are kept in {kept}"
    assert not scopes[0].folder.exists()


@pytest.mark.parametrize("end", [None, KeyboardInterrupt, SystemExit])
def test_logs_of_other_runs_go(tmp_path: Path, end: type[BaseException] | None) -> None:
    expected = pytest.raises(end) if end is not None else nullcontext()
    with expected, nothing_left_behind() as scope:
        ray_session(scope, worker=b"fine")
        if end is not None:
            raise end
    assert not (tmp_path / "kept").exists()


def test_kept_logs_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_logs, "MAX_RUNS", 2)
    monkeypatch.setattr(kept_logs, "MAX_BYTES", 20)
    monkeypatch.setattr(kept_logs, "MAX_BYTES_A_FILE", 8)
    scope = RunScope("run", tmp_path / "ray", [])
    ray_session(scope, a=b"0123456789", b=b"0123456789", c=b"0123456789")
    stamps = iter("123")
    monkeypatch.setattr(kept_logs.time, "strftime", lambda _: next(stamps))
    kept = [kept_logs.keep_logs(scope.folder, scope.run_id) for _ in range(3)]
    assert all(kept)
    assert sorted((tmp_path / "kept").iterdir()) == kept[1:]
    found = [path.read_bytes() for path in (tmp_path / "kept").rglob("*") if path.is_file()]
    assert found == [b"23456789"] * 4  # of three files two have room


DRIVER = """
import os, subprocess, sys, time
from agl_fast.verl.supervision.run_scope import nothing_left_behind
nap = [sys.executable, "-c", "import time; time.sleep(600)"]
with nothing_left_behind() as scope:
    (scope.folder / "session_1" / "logs").mkdir(parents=True)
    (scope.folder / "session_1" / "logs" / "worker").write_text("why")
    path = "/dev/shm/psm_" + scope.run_id[:8]
    with scope.environment():
        ours = subprocess.Popen([sys.executable, "-c", sys.argv[1], path], stdout=subprocess.PIPE)
        assert ours.stdout.readline() == b"mapped\\n"
    users = subprocess.Popen(nap, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if os.fork() == 0:  # holds every pipe open
        time.sleep(600)
    print(scope.run_id, scope.folder, path, users.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_driver_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """Where no handler is at work, SIGTERM kills as well."""
    with (tmp_path / "stderr").open("w") as errors:
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, MAPPING],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    assert driver.stdout is not None
    run_id, folder, path, users = driver.stdout.readline().split()
    try:
        assert len(processes_of_run(run_id)) == 1
        os.kill(driver.pid, number)
        driver.wait(10)
        end = time.monotonic() + 30
        while "killed" not in (tmp_path / "stderr").read_text():
            assert time.monotonic() < end
            time.sleep(0.1)
        assert processes_of_run(run_id) == []
        assert not Path(folder).exists()
        assert not Path(path).exists()
        os.kill(int(users), 0)  # the user's process lives
        (kept,) = tmp_path.glob("agl_fast-logs-*/*")
        assert (kept / "session_1" / "logs" / "worker").read_text() == "why"
        assert str(kept) in (tmp_path / "stderr").read_text()
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.stdout.close()
