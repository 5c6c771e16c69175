"""Write recordings."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import agl_fast
from agl_fast.recording.codec import encode_rollout
from agl_fast.rows.calls import Rollout

FORMAT = "agl_fast"
VERSION = 1
FOLDER_MODE = 0o700
FILE_MODE = 0o600


class RecordingWriter:
    """Writes a recording, one line per rollout; ``write`` returns when the line is in the file.

    The file has mode 0600.

    Args:
        path: a new file. With the suffix ``.gz`` each line is compressed separately, so that the
            file stays readable up to its last line however the process ends.
        about: metadata of the file (docs/recording.md).

    Raises:
        OSError: the file exists already, or cannot be written.
    """

    def __init__(
        self, path: str | os.PathLike[str], about: Mapping[str, Any] | None = None
    ) -> None:
        self.path = Path(path)
        self._compresses = self.path.suffix == ".gz"
        # Unbuffered, so that a write error belongs to the current rollout.
        self._file = open(self.path, "xb", buffering=0, opener=private_opener)  # noqa: SIM115
        header = {"recording": FORMAT, "version": VERSION, "agl_fast": agl_fast.__version__}
        try:
            self._append({**header, "about": dict(about or {})})
        except BaseException:
            self._file.close()
            self.path.unlink()
            raise

    def write(self, rollout: Rollout) -> None:
        """Append a rollout. An error leaves the file unchanged.

        Raises:
            TypeError, ValueError: a field is of the wrong type; the message names it.
            OSError: the file cannot be written.
        """
        self._append(encode_rollout(rollout))

    def write_many(self, rollouts: Iterable[Rollout]) -> None:
        for rollout in rollouts:
            self.write(rollout)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> RecordingWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, value: dict[str, Any]) -> None:
        # Samples and sampling parameters may hold any object; JSON falls back to repr.
        line = memoryview(self._packed(_json(value) + b"\n"))
        begin = self._file.tell()
        try:
            while line:
                line = line[self._file.write(line) :]
        except BaseException:
            self._file.truncate(begin)
            self._file.seek(begin)
            raise

    def _packed(self, line: bytes) -> bytes:
        return gzip.compress(line, compresslevel=1, mtime=0) if self._compresses else line


def _json(value: dict[str, Any]) -> bytes:
    """Encode as UTF-8, also strings with lone surrogates."""
    options: dict[str, Any] = {"separators": (",", ":"), "default": repr}
    try:
        return json.dumps(value, ensure_ascii=False, **options).encode()
    except UnicodeEncodeError:  # lone surrogates, which JSON can only escape
        return json.dumps(value, ensure_ascii=True, **options).encode()


def private_folder(folder: Path) -> None:
    """Create a folder with mode 0700; parents get the usual mode. An existing one is unchanged."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=FOLDER_MODE, exist_ok=True)


def private_opener(path: str, flags: int) -> int:
    """An ``opener`` for ``open`` that creates files with mode 0600."""
    return os.open(path, flags, FILE_MODE)
