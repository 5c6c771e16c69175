"""Samples from the files that `data.train_files` and `data.val_files` name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agl_fast.rollouts.batch_runner import plain

_SUFFIXES = ".parquet, .json, .jsonl"


def load_samples(files: str | Sequence[str], key: str) -> list[dict[str, Any]]:
    """All samples of one file or several, in their order.

    Args:
        files: `.parquet`, `.json` (a list of objects) or `.jsonl` (one a line).
        key: that names them, for errors.

    Raises:
        FileNotFoundError, ValueError: a file is not there, or holds no samples; the message names
            key, file and line.
    """
    samples = []
    for file in [files] if isinstance(files, str) else list(files):
        path = Path(file).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"{key}={file}: expected a file, there is none")
        samples += _samples_of(path, f"{key}={file}")
    return samples


def _samples_of(path: Path, where: str) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        from pyarrow import parquet

        return [plain(row) for row in parquet.read_table(path).to_pylist()]
    if path.suffix == ".json":
        values = _parse(path.read_text("utf-8"), where)
        if not isinstance(values, list):
            raise ValueError(f"{where}: expected a list of objects, got a {type(values).__name__}")
        return [_object(value, f"{where}: sample {i}") for i, value in enumerate(values)]
    if path.suffix == ".jsonl":
        lines = path.read_text("utf-8").split("\n")
        return [
            _object(_parse(line, f"{where}, line {i}"), f"{where}, line {i}")
            for i, line in enumerate(lines, start=1)
            if line.strip()
        ]
    raise ValueError(f"{where}: expected one of {_SUFFIXES}")


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from None


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, got {value!r}")
    return value
