"""Is there a model, and can it see as far as the servers are told?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from agl_fast.verl.config.checks import check_context

NOT_SET = (
    "actor_rollout_ref.model.path is not set: expected the model to train, a folder or the name "
    "of one on the Hugging Face hub"
)
POSITIONS = "max_position_embeddings"


def check_model(config: DictConfig, default_path: str) -> list[str]:
    """Hold the settings of the model against what is on this machine.

    Args:
        config: composed.
        default_path: verl's own example, which stands where the user has set none.

    Returns:
        A line where a name that looks like a folder will be asked of the Hugging Face hub.

    Raises:
        ValueError: there is no path, or no model at it, or `max_model_len` is beyond it. The
            message names the key, its value and what is expected.
    """
    path = config.actor_rollout_ref.model.path
    if path is None:
        raise ValueError(NOT_SET)
    folder = Path(path)  # neither verl nor transformers expands ~
    if (folder / "config.json").is_file():
        _check_length(config, json.loads((folder / "config.json").read_text()))
        return []
    if path == default_path:
        raise ValueError(NOT_SET)
    if "://" in path:
        return []
    if path.startswith(("/", ".", "~")) or folder.exists():
        raise ValueError(
            f"actor_rollout_ref.model.path={path!r}: expected a folder with a config.json "
            "(written without ~), or the name of a model on the Hugging Face hub"
        )
    if len(folder.parts) > 1 and Path(folder.parts[0]).is_dir():
        return [
            f"actor_rollout_ref.model.path={path} is no folder with a config.json, though "
            f"{folder.parts[0]} is one: it will be asked of the Hugging Face hub"
        ]
    return []


def _check_length(config: DictConfig, model: dict[str, Any]) -> None:
    parts = config.actor_rollout_ref
    if parts.model.hf_config_path is not None or POSITIONS in (parts.model.override_config or {}):
        return
    wanted = parts.rollout.max_model_len
    longest = model.get(POSITIONS, (model.get("text_config") or {}).get(POSITIONS))
    if longest is None:
        return
    if wanted is not None and wanted > longest:
        raise ValueError(
            f"actor_rollout_ref.rollout.max_model_len={wanted}: expected at most {longest}, the "
            f"{POSITIONS} of {parts.model.path}"
        )
    if wanted is None:  # vLLM takes the model's
        check_context(config, longest, f"{POSITIONS} of {parts.model.path}")
