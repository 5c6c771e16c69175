"""The training loop and the PPO step."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agl_fast.training.step import PpoStep, ppo_step
    from agl_fast.training.trainer import AgentLightningTrainer
    from agl_fast.training.worker_groups import WorkerGroups

__all__ = ["AgentLightningTrainer", "PpoStep", "WorkerGroups", "ppo_step"]

# Loaded on first use: a step needs no Agent-lightning, a mini-batch layout not even verl.
_HOMES = {
    "AgentLightningTrainer": "agl_fast.training.trainer",
    "PpoStep": "agl_fast.training.step",
    "ppo_step": "agl_fast.training.step",
    "WorkerGroups": "agl_fast.training.worker_groups",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
