"""Ray's logs of runs that failed, where the errors of its workers are."""

from __future__ import annotations

import getpass
import shutil
import tempfile
import time
from pathlib import Path

MAX_RUNS = 5
MAX_BYTES = 64 * 2**20
MAX_BYTES_A_FILE = 4 * 2**20


def logs_folder() -> Path:
    """Of this user's runs, in the system's temporary folder."""
    return Path(tempfile.gettempdir()) / f"agl_fast-logs-{getpass.getuser()}"


def keep_logs(ray_folder: Path, run_id: str) -> Path | None:
    """Copy the logs of Ray's sessions in a folder to where they outlive the run.

    At most `MAX_BYTES` a run, the newest files first; of a long file its last
    `MAX_BYTES_A_FILE`. Older runs than the last `MAX_RUNS` are removed.

    Returns:
        The folder with the copies; None: there are no logs.
    """
    files = sorted(
        (
            path
            for session in ray_folder.glob("session_*")
            if not session.is_symlink()
            for path in (session / "logs").rglob("*")
            if path.is_file() and not path.is_symlink() and path.stat().st_size
        ),
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )
    if not files:
        return None
    root = logs_folder()
    kept = root / f"{time.strftime('%Y%m%d-%H%M%S')}-{run_id[:8]}"
    left = MAX_BYTES
    for path in files:
        size = min(path.stat().st_size, MAX_BYTES_A_FILE)
        if size > left:
            break
        left -= size
        target = kept / path.relative_to(ray_folder)
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with path.open("rb") as source, target.open("wb") as out:
            source.seek(max(0, path.stat().st_size - size))
            out.write(source.read(size))
    for old in sorted(root.iterdir())[:-MAX_RUNS]:
        shutil.rmtree(old, ignore_errors=True)
    return kept
