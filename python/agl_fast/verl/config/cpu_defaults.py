"""Settings with which verl runs on a machine without an accelerator."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from agl_fast.verl.weight_files import largest_weight

TABLE = Path(__file__).with_name("cpu_defaults.yaml")
BUCKET = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
ENV_VARS = "ray_kwargs.ray_init.runtime_env.env_vars."


@dataclass(frozen=True)
class CpuDefaults:
    """One group of the table, whose comments say what the fields mean."""

    why: str
    set: dict[str, Any]
    user: Literal["keep", "refuse", "overrule"] = "keep"
    where: dict[str, Any] = field(default_factory=dict)


def cpu_defaults() -> list[CpuDefaults]:
    table: Any = OmegaConf.to_container(OmegaConf.load(TABLE), resolve=False)
    return [CpuDefaults(**group) for group in table]


def fill_in(config: DictConfig, user_keys: Collection[str], unused: tuple[str, ...]) -> list[str]:
    """Set what a CPU needs and the user has not set.

    Args:
        config: changed in place.
        user_keys: dotted keys that the user has set.
        unused: prefixes of parts that this run has no use for.

    Returns:
        One notice that lists what was set, a line per reason; or none.

    Raises:
        ValueError: the user has set what cannot work on a CPU.
    """
    lines = []
    for group in cpu_defaults():
        if any(OmegaConf.select(config, key) != value for key, value in group.where.items()):
            continue
        changes = []
        for key, value in group.set.items():
            present = OmegaConf.select(config, key)
            is_users = key in user_keys
            if key.startswith(unused) or present == value or (is_users and group.user == "keep"):
                continue
            if is_users and group.user == "refuse":
                raise ValueError(f"{key}={present!r}: expected {value!r}, as {group.why}")
            if key.startswith(ENV_VARS) and key.removeprefix(ENV_VARS) in os.environ:
                continue
            OmegaConf.update(config, key, value, force_add=True)
            replaced = f" in place of {present}" if is_users else ""
            changes.append(f"{key}={OmegaConf.select(config, key)}{replaced}")
        if changes:
            lines.append(f"    {', '.join(changes)} ({group.why})")
    return ["\n".join(["on this CPU, these values are filled in:", *lines])] if lines else []


def fit_bucket(config: DictConfig, user_keys: Collection[str]) -> list[str]:
    """Let the largest weight fit into a bucket of the weight sync, where the model is at hand.

    Args:
        config: changed in place.
        user_keys: dotted keys that the user has set.

    Returns:
        A line that says so, or none.

    Raises:
        ValueError: the user's bucket is too small.
    """
    elements = largest_weight(str(config.actor_rollout_ref.model.path))
    least = -(-4 * (elements or 0) // 2**20)  # the actor's parameters are float32
    bucket = OmegaConf.select(config, BUCKET)
    if bucket >= least:
        return []
    why = "verl sends a weight through shared memory whole, and the model's largest needs so much"
    if BUCKET in user_keys:
        raise ValueError(f"{BUCKET}={bucket}: expected at least {least}, as {why}")
    OmegaConf.update(config, BUCKET, least)
    return [f"on this CPU, {BUCKET}={least} ({why})"]
