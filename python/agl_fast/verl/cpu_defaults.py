"""Settings with which verl runs on a machine without an accelerator."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

TABLE = Path(__file__).with_name("cpu_defaults.yaml")
ENV_VARS = "ray_kwargs.ray_init.runtime_env.env_vars."


@dataclass(frozen=True)
class CpuDefaults:
    """One group of the table, whose comments say what the fields mean."""

    why: str
    set: dict[str, Any]
    user: Literal["keep", "refuse", "overrule"] = "keep"


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
        One line per reason: what was set.

    Raises:
        ValueError: the user has set what cannot work on a CPU.
    """
    lines = []
    for group in cpu_defaults():
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
            lines.append(f"on this CPU, {', '.join(changes)} ({group.why})")
    return lines
