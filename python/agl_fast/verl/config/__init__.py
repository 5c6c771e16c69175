"""The configuration of a run, composed and checked before anything starts."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agl_fast.verl.config.composition import (
        Composed,
        compose,
        decide_with_model,
        default_model_path,
        differences,
        merge_settings,
    )

__all__ = [
    "OWN_CONFIG",
    "Composed",
    "compose",
    "decide_with_model",
    "default_model_path",
    "differences",
    "merge_settings",
]

OWN_CONFIG = Path(__file__).with_name("config.yaml")
_COMPOSITION = "agl_fast.verl.config.composition"


def __getattr__(name: str) -> Any:
    """Load verl and hydra on first use: a runner that reads a deadline needs neither."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_COMPOSITION), name)
