"""How large a model's weights are, from the headers of its safetensors files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path


def total_bytes(model: str) -> int | None:
    """Of all its files; None where the model is not a folder on this machine."""
    if not Path(model).is_dir():
        return None
    return sum(path.stat().st_size for path in _files(model))


def largest_weight(model: str) -> int | None:
    """Elements of the largest weight; None where no file says."""
    return max((size for path in _files(model) for size in _weights(path)), default=None)


def _files(model: str) -> list[Path]:
    return sorted(Path(model).glob("*.safetensors"))


def _weights(path: Path) -> Iterator[int]:
    # Eight bytes hold the length of a JSON header, which names each weight's shape.
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    for name, weight in header.items():
        if name != "__metadata__":
            yield math.prod(weight["shape"])
