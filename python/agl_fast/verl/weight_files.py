"""How large a model's weights are, from the headers of its safetensors files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import snapshot_download


def total_bytes(model: str) -> int | None:
    """Of its weight files; None where they are not on this machine."""
    folder = model_folder(model)
    if folder is None:
        return None
    paths = _files(folder) or sorted(folder.glob("pytorch_model*.bin"))
    return sum(path.stat().st_size for path in paths) or None


def largest_weight(model: str) -> int | None:
    """Elements of the largest weight; None where no file says."""
    folder = model_folder(model)
    if folder is None:
        return None
    return max((size for path in _files(folder) for size in _weights(path)), default=None)


def model_folder(model: str) -> Path | None:
    """The folder itself, or what the Hugging Face cache has of a model on the hub; else None."""
    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (OSError, ValueError):  # not in the cache; no name of a model
        return None


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _weights(path: Path) -> Iterator[int]:
    # Eight bytes hold the length of a JSON header, which names each weight's shape.
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    for name, weight in header.items():
        if name != "__metadata__":
            yield math.prod(weight["shape"])
