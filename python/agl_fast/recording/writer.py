"""Rollouts into a file."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import agl_fast
from agl_fast.recording.encoding import encode_rollout
from agl_fast.recording.private import private_opener
from agl_fast.rows.calls import Rollout

FORMAT = "agl_fast"
VERSION = 1


class RecordingWriter:
    """Writes a recording, one line a rollout; a line is in the file when ``write`` returns.

    Only the file's owner may read it.

    Args:
        path: a new file; with the suffix ``.gz`` every line is compressed by itself, so that the
            file can be read up to its last line whatever ends the process.
        about: what is said of all of them (docs/recording.md).

    Raises:
        OSError: the file is there already, or cannot be written.
    """

    def __init__(
        self, path: str | os.PathLike[str], about: Mapping[str, Any] | None = None
    ) -> None:
        self.path = Path(path)
        self._compresses = self.path.suffix == ".gz"
        # Unbuffered: what cannot be written is known at once, and which rollout it was.
        self._file = open(self.path, "xb", buffering=0, opener=private_opener)  # noqa: SIM115
        header = {"recording": FORMAT, "version": VERSION, "agl_fast": agl_fast.__version__}
        try:
            self._append({**header, "about": dict(about or {})})
        except BaseException:
            self._file.close()
            self.path.unlink()
            raise

    def write(self, rollout: Rollout) -> None:
        """Append a rollout. On an error the file is as before.

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
        # Samples and sampling parameters may hold anything; what JSON has no word for is told.
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
    """UTF-8, whatever the strings hold."""
    options: dict[str, Any] = {"separators": (",", ":"), "default": repr}
    try:
        return json.dumps(value, ensure_ascii=False, **options).encode()
    except UnicodeEncodeError:  # lone surrogates, which JSON can only escape
        return json.dumps(value, ensure_ascii=True, **options).encode()
