"""Read recordings."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from agl_fast.recording.codec import FieldError, decode_rollout, decode_trace, is_trace
from agl_fast.recording.writer import FORMAT, VERSION
from agl_fast.rows.calls import Rollout


class RecordingError(ValueError):
    """A file is not a valid recording; the message names line and field."""


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """The contents of a recording.

    Attributes:
        path: of the file.
        about: metadata of the file (docs/recording.md); empty for token traces.
        rollouts: in the file's order. Ids are int32 arrays, log-probs float32 arrays.
    """

    path: Path
    about: Mapping[str, Any] = field(default_factory=dict)
    rollouts: list[Rollout] = field(default_factory=list)


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """Read a recording, or a file of token traces (docs/recording.md), plain or compressed.

    Raises:
        OSError: the file cannot be read.
        RecordingError: the file is not a valid recording, or has a newer version.
    """
    path = Path(path)
    about: Mapping[str, Any] | None = None
    rollouts: dict[str, Rollout] = {}
    try:
        for number, value in _values(path):
            where = f"{path}, line {number}"
            if number == 1 and not is_trace(value):
                about = _about(value, where)
                continue
            decode = decode_trace if about is None else decode_rollout
            try:
                rollout = decode(value)
            except FieldError as error:
                raise RecordingError(f"{where}: {error}") from None
            if rollout.rollout_id in rollouts:
                raise RecordingError(
                    f"{where}: rollout_id: {rollout.rollout_id!r} stands in an earlier line"
                )
            rollouts[rollout.rollout_id] = rollout
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RecordingError(f"{path}: the compressed data is damaged: {error}") from error
    if about is None and not rollouts:
        raise RecordingError(f"{path}: the file is empty")
    return Recording(path, about or {}, list(rollouts.values()))


def _values(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with _open(path) as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            try:
                value = json.loads(line, parse_constant=_refuse_constant)
            except (ValueError, RecursionError) as error:
                cut = "" if line.endswith(b"\n") else " (the line has no end: was it cut off?)"
                raise RecordingError(f"{where}: not JSON: {error}{cut}") from None
            if not isinstance(value, dict):
                raise RecordingError(f"{where}: expected an object, got a {type(value).__name__}")
            yield number, value


def _open(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        is_compressed = file.read(2) == b"\x1f\x8b"
    return cast("IO[bytes]", gzip.open(path) if is_compressed else path.open("rb"))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _about(header: Mapping[str, Any], where: str) -> dict[str, Any]:
    if header.get("recording") != FORMAT:
        raise RecordingError(
            f"{where}: recording: expected {FORMAT!r}, got {header.get('recording')!r}: this is no "
            "recording of agl_fast"
        )
    version = header.get("version")
    if version != VERSION:
        raise RecordingError(
            f"{where}: version: expected {VERSION}, got {version!r}, written by agl_fast "
            f"{header.get('agl_fast')}"
        )
    about = header.get("about")
    if not isinstance(about, dict):
        raise RecordingError(f"{where}: about: expected an object, got {about!r}")
    return about
