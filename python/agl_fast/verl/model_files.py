"""Facts from a model's files on this machine: config.json and headers of safetensors files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download


def model_folder(model: str) -> Path | None:
    """The folder itself, or a hub model's folder in the Hugging Face cache; else None."""
    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (OSError, ValueError):  # not in the cache; no name of a model
        return None


def vocabulary_size(model: str) -> int | None:
    """Number of logits per token; None if the model is not on this machine."""
    return _number_in_config(model, "vocab_size")


def context_length(model: str) -> int | None:
    """Maximum number of positions; None if the model is not on this machine or does not say."""
    return _number_in_config(model, "max_position_embeddings")


def total_bytes(model: str) -> int | None:
    """Size of the weight files; None if they are not on this machine."""
    folder = model_folder(model)
    if folder is None:
        return None
    paths = _weight_files(folder) or sorted(folder.glob("pytorch_model*.bin"))
    return sum(path.stat().st_size for path in paths) or None


def largest_weight(model: str) -> int | None:
    """Number of elements of the largest weight; None if no safetensors file is on this machine."""
    folder = model_folder(model)
    if folder is None:
        return None
    return max((size for path in _weight_files(folder) for size in _weights(path)), default=None)


def _number_in_config(model: str, name: str) -> int | None:
    """A number of config.json, of the model or of the language model in it."""
    folder = model_folder(model)
    path = None if folder is None else folder / "config.json"
    if path is None or not path.is_file():
        return None
    config: dict[str, Any] = json.loads(path.read_text())
    found = config.get(name, (config.get("text_config") or {}).get(name))
    return found if isinstance(found, int) else None


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _weights(path: Path) -> Iterator[int]:
    # Eight bytes hold the length of a JSON header, which names each weight's shape.
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    for name, weight in header.items():
        if name != "__metadata__":
            yield math.prod(weight["shape"])
