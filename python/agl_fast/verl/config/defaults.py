"""Defaults that depend on other keys, on the model and on the device."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from agl_fast.rows.options import config_keys
from agl_fast.verl.model_files import largest_weight

CPU_DEFAULTS = Path(__file__).with_name("cpu_defaults.yaml")
BUCKET = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
ENV_VARS = "ray_kwargs.ray_init.runtime_env.env_vars."


@dataclass(frozen=True)
class Defaults:
    """Values for keys that the user has not set. cpu_defaults.yaml explains the fields."""

    why: str
    set: dict[str, Any]
    user: Literal["keep", "refuse", "overrule"] = "keep"
    where: dict[str, Any] = field(default_factory=dict)


# Without it verl loads the adapter beside the base model under a name of its own, which only its
# own agent loop requests: agents would sample with the base model, whatever is trained.
LORA_DEFAULTS = Defaults(
    why="the servers sample with the trained adapter only if it is merged into their weights",
    user="refuse",
    set={"actor_rollout_ref.model.lora.merge": True},
)


def cpu_defaults() -> list[Defaults]:
    table: Any = OmegaConf.to_container(OmegaConf.load(CPU_DEFAULTS), resolve=False)
    return [Defaults(**group) for group in table]


def fill_in(
    config: DictConfig, user_keys: Collection[str], groups: Iterable[Defaults]
) -> list[str]:
    """Set the values of some groups of defaults where the user has not set them.

    Args:
        config: changed in place.
        user_keys: dotted keys that the user has set.

    Returns:
        For each group that changed something one line: its changes and the reason.

    Raises:
        ValueError: the user has set a value that cannot work.
    """
    lines = []
    for group in groups:
        if any(OmegaConf.select(config, key) != value for key, value in group.where.items()):
            continue
        changes = []
        for key, value in group.set.items():
            present = OmegaConf.select(config, key)
            is_users = key in user_keys
            if present == value or (is_users and group.user == "keep"):
                continue
            if is_users and group.user == "refuse":
                raise ValueError(f"{key}={present!r}: expected {value!r}, as {group.why}")
            if key.startswith(ENV_VARS) and key.removeprefix(ENV_VARS) in os.environ:
                continue
            OmegaConf.update(config, key, value, force_add=True)
            replaced = f" in place of {present}" if is_users else ""
            changes.append(f"{key}={OmegaConf.select(config, key)}{replaced}")
        if changes:
            lines.append(f"{', '.join(changes)} ({group.why})")
    return lines


def fill_in_critic(config: DictConfig, user_keys: Collection[str]) -> list[str]:
    """Decide whether there is a critic, and start it from the actor's model."""
    if config.critic.enable is None:
        config.critic.enable = config.algorithm.adv_estimator == "gae"
    if not config.critic.enable or "critic.model.path" in user_keys:
        return []
    config.critic.model.path = "${actor_rollout_ref.model.path}"
    return ["critic.model.path is not set: the critic starts from the actor's model"]


def fill_in_lora(config: DictConfig, user_keys: Collection[str]) -> list[str]:
    """Merge the actor's adapter, if it trains one, into the weights that the servers get."""
    model = config.actor_rollout_ref.model
    # As verl's FSDP engine decides it.
    uses_lora = model.lora_rank > 0 or model.lora_adapter_path is not None
    return fill_in(config, user_keys, [LORA_DEFAULTS]) if uses_lora else []


def fill_in_cpu(
    config: DictConfig, user_keys: Collection[str], unused: tuple[str, ...]
) -> list[str]:
    """Set what a run on a CPU needs.

    Args:
        config: changed in place.
        user_keys: dotted keys that the user has set.
        unused: prefixes of the keys of parts that this run does not have.

    Returns:
        One notice that lists what was set, if anything was; one for the bucket of the weight sync.

    Raises:
        ValueError: the user has set a value that cannot work on a CPU.
    """
    used = [
        replace(group, set={k: v for k, v in group.set.items() if not k.startswith(unused)})
        for group in cpu_defaults()
    ]
    lines = [f"    {line}" for line in fill_in(config, user_keys, used)]
    notice = "\n".join(["on this CPU, these values are filled in:", *lines])
    return [*([notice] if lines else []), *_fit_bucket(config, user_keys)]


def _fit_bucket(config: DictConfig, user_keys: Collection[str]) -> list[str]:
    """Make a bucket of the weight sync hold the largest weight of a model on this machine."""
    elements = largest_weight(str(config.actor_rollout_ref.model.path))
    least = -(-4 * (elements or 0) // 2**20)  # the actor's parameters are float32
    bucket = OmegaConf.select(config, BUCKET)
    if bucket >= least:
        return []
    why = "verl sends each weight through shared memory as a whole; the model's largest needs this"
    if BUCKET in user_keys:
        raise ValueError(f"{BUCKET}={bucket}: expected at least {least}, as {why}")
    OmegaConf.update(config, BUCKET, least)
    return [f"on this CPU, {BUCKET}={least} ({why})"]


def loss_scale_factor(config: DictConfig) -> int:
    """Divisor of `seq-mean-token-sum-norm`: the configured width of responses, not the batch's."""
    configured = config.actor_rollout_ref.actor.loss_scale_factor
    keys = config_keys(config.agentlightning.trace_aggregator.level)
    width = OmegaConf.select(config, keys["max_response_length"])
    return int(width if configured is None else configured)
