"""What belongs to a run: its processes, its temporary folder, its shared memory, and their end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from agl_fast.verl.supervision.kept_logs import keep_logs
from agl_fast.verl.supervision.leftovers import (
    RUN_VARIABLE,
    segments_of_run,
    shared_memory_segments,
    stop_processes_of_run,
    unlink_segments,
)
from agl_fast.verl.supervision.run_errors import add_note

_SEGMENTS = "agl_fast-segments"


@dataclass(frozen=True, slots=True)
class RunScope:
    """What tells a run's processes, files and shared memory from those of others.

    Neither the name nor the age of a segment says whose it is, and one that nobody maps may be on
    its way from one process of a program to the next. The run's are those that its own processes
    have been seen to map: `note_segments` writes them down while they live.

    Attributes:
        run_id: the value of `RUN_VARIABLE` in the run's processes.
        folder: a temporary folder with a short path, as Ray's sockets need it.
        segments_before: names of shared memory that was there before the run.
    """

    run_id: str
    folder: Path
    segments_before: list[str]

    @contextmanager
    def environment(self) -> Iterator[None]:
        """Mark the processes that the block starts, and all that descend from them.

        Only Ray is started in such a block. What the user's program starts is not marked, and is
        left alone when the run ends.
        """
        of_run = {RUN_VARIABLE: self.run_id, "TMPDIR": str(self.folder)}
        before = {name: os.environ.get(name) for name in of_run}
        os.environ.update(of_run)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def to_json(self) -> str:
        return json.dumps([self.run_id, str(self.folder), self.segments_before])

    @classmethod
    def from_json(cls, text: str | bytes) -> RunScope:
        run_id, folder, segments_before = json.loads(text)
        return cls(run_id, Path(folder), segments_before)

    def note_segments(self) -> None:
        """Write down which segments the run's processes map now.

        Driver and reaper both do, in one file; nothing is written once the folder is removed.
        """
        names = segments_of_run(self.run_id) - set(self.segments_before) - self._noted()
        try:
            # Appended in one piece, whoever else writes now.
            file = os.open(self.folder / _SEGMENTS, os.O_WRONLY | os.O_APPEND)
        except FileNotFoundError:
            return
        try:
            os.write(file, "".join(f"{name}\n" for name in sorted(names)).encode())
        finally:
            os.close(file)

    def _noted(self) -> set[str]:
        try:
            return set((self.folder / _SEGMENTS).read_text().split())
        except FileNotFoundError:
            return set()

    def clean_up(
        self, *, grace_seconds: float = 10.0, failed: bool
    ) -> tuple[list[str], Path | None]:
        """End the processes, free their memory, remove the folder.

        Args:
            grace_seconds: for processes to end by themselves.
            failed: keep Ray's logs.

        Returns:
            What could not be removed; and where the logs are, if any were kept.
        """
        self.note_segments()
        left = stop_processes_of_run(self.run_id, grace_seconds=grace_seconds)
        left += unlink_segments(self._noted())
        logs = keep_logs(self.folder, self.run_id) if failed else None
        shutil.rmtree(self.folder, ignore_errors=True)
        return left, logs


@contextmanager
def nothing_left_behind() -> Iterator[RunScope]:
    """Clean up after the run, also where this process is killed.

    Ray's logs are kept where the run failed; the error says where.

    Raises:
        RuntimeError: naming the processes or segments that could not be removed.
    """
    scope = RunScope(
        uuid4().hex, Path(tempfile.mkdtemp(prefix="agl-")), sorted(shared_memory_segments())
    )
    (scope.folder / _SEGMENTS).touch()
    reaper = _started_reaper(scope)
    failure: Exception | None = None
    try:
        yield scope
    except Exception as error:
        failure = error
        raise
    finally:
        left, logs = scope.clean_up(failed=failure is not None)
        reaper.kill()
        reaper.wait()
        if logs is not None:
            add_note(failure, f"Ray's logs, with the output of every worker, are kept in {logs}")
        if left:
            what = f"left behind: {', '.join(left)}"
            if failure is None:
                raise RuntimeError(what)
            add_note(failure, what)


def _started_reaper(scope: RunScope) -> subprocess.Popen[bytes]:
    reaper = subprocess.Popen(
        [sys.executable, "-m", "agl_fast.verl.supervision.reaper", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # signals to the run's group spare it
    )
    assert reaper.stdin is not None
    reaper.stdin.write(scope.to_json().encode())
    reaper.stdin.close()
    return reaper
