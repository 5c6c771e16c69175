"""What a model's config.json says, where it is on this machine."""

from __future__ import annotations

import json
from typing import Any

from agl_fast.verl.weight_files import model_folder


def model_config(model: str) -> dict[str, Any] | None:
    """The config.json of a folder, or of a model in the Hugging Face cache; None: there is none."""
    folder = model_folder(model)
    path = None if folder is None else folder / "config.json"
    if path is None or not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def vocabulary_size(model: str) -> int | None:
    """Logits of a token; None where the model is not on this machine."""
    return _of_text(model_config(model), "vocab_size")


def context_length(model: str) -> int | None:
    """The longest context that the model takes; None where nothing says."""
    return _of_text(model_config(model), "max_position_embeddings")


def _of_text(config: dict[str, Any] | None, name: str) -> int | None:
    """A number of the model, or of the language model in it."""
    if config is None:
        return None
    found = config.get(name, (config.get("text_config") or {}).get(name))
    return found if isinstance(found, int) else None
