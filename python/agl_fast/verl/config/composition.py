"""The configuration of a run: verl's defaults, agl_fast's, then the user's settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agl_fast.verl.config import OWN_CONFIG
from agl_fast.verl.config.attention_choice import (
    attention_memory,
    can_read_models,
    choose_attention,
)
from agl_fast.verl.config.batch_limits import fill_in_batches, fit_micro_batches
from agl_fast.verl.config.checks import CHECKS, needs_reference, run_checks
from agl_fast.verl.config.collection import fill_in_collection
from agl_fast.verl.config.defaults import (
    fill_in_cpu,
    fill_in_critic,
    fill_in_lora,
    loss_scale_factor,
)
from agl_fast.verl.config.effects import check_effects, move_values
from agl_fast.verl.config.key_checks import check_keys
from agl_fast.verl.config.servers import fill_in_engine_arguments
from agl_fast.verl.config.user_settings import leaves, nested, plain_settings, rename
from agl_fast.verl.device_choice import choose_device, use_device

_SECRETS = ("agentlightning.proxy.api_key",)
USE_V1_LINE = (
    "trainer.use_v1=false: agl_fast's rows go through verl's RayPPOTrainer; the V1 trainer takes "
    "its batches from a queue that verl's own agent loops fill"
)


@dataclass(frozen=True)
class Composed:
    """A configuration.

    Attributes:
        config: interpolations are not resolved yet.
        lines: for the user: keys that moved, values that were filled in, settings without effect.
        open_keys: the user's dotted keys, for `decide_with_model`, if a model is not on this
            machine; None: nothing is left to decide.
    """

    config: DictConfig
    lines: list[str]
    open_keys: frozenset[str] | None = None


def compose(
    settings: Mapping[str, Any], *, device: str | None = None, added: Collection[str] = ()
) -> Composed:
    """Compose and check a configuration: `merge_settings`, then `checks.CHECKS`.

    Args:
        settings: a tree of overrides, as plain values or an OmegaConf. `+` before the name marks a
            key that neither verl nor agl_fast has, as in hydra.
        device: verl's name of the device; None: it is chosen, and verl in this process uses it.
        added: further dotted keys that need not be known, as those of an earlier run.

    Raises:
        TypeError: a setting has the wrong type.
        ValueError: a setting, or a combination, cannot work. Both name the key, its value and what
            is expected.
    """
    merged = merge_settings(settings, device=device, added=added)
    return replace(merged, lines=merged.lines + run_checks(merged.config, CHECKS))


def merge_settings(
    settings: Mapping[str, Any], *, device: str | None = None, added: Collection[str] = ()
) -> Composed:
    """Merge the user's settings into verl's `ppo_trainer` defaults and agl_fast's `config.yaml`.

    Keys, types and values that have no effect are checked, combinations are not. Arguments and
    errors are those of `compose`.
    """
    if not isinstance(settings, Mapping):
        raise TypeError(
            f"config={settings!r}: expected a mapping of settings, got {type(settings).__name__}"
        )
    plain, marked = plain_settings(settings)
    flat, lines = rename(dict(leaves(plain)))
    given = nested(_without_interpolations(flat, OmegaConf.merge(_defaults(), nested(flat))))
    check_keys(given, _resolved_defaults(), marked.union(added))
    flat, copied = move_values(flat)

    if device is None:
        chosen = choose_device(flat)
        use_device(chosen.name)
        device = chosen.name
        lines += chosen.lines
    config, filled_in = _filled_in(flat, device)
    lines += copied + filled_in
    parts = {"critic": config.critic.enable, "reference": needs_reference(config)}
    lines += check_effects(
        dict(leaves(given)),
        dict(leaves(_resolved_defaults())),
        {part for part, is_there in parts.items() if is_there},
    )
    config.actor_rollout_ref.actor.loss_scale_factor = loss_scale_factor(config)
    lines += fill_in_engine_arguments(config)
    open_keys = None if can_read_models(config, local_only=True) else frozenset(flat)
    return Composed(config, lines, open_keys)


def decide_with_model(config: DictConfig, user_keys: Collection[str]) -> list[str]:
    """Fill in what `merge_settings` left open because the model was not on this machine.

    The model's configuration is downloaded from the Hugging Face hub, which the run needs as well.

    Args:
        config: changed in place.
        user_keys: `Composed.open_keys`.

    Returns:
        Lines for the user.

    Raises:
        ValueError: the settings do not fit the model.
    """
    can_read_models(config, local_only=False)
    lines = choose_attention(config, user_keys, config.trainer.device, local_only=False)
    lines += fit_micro_batches(config, user_keys)
    return lines + attention_memory(config, config.trainer.device)


def differences(config: DictConfig) -> dict[str, Any]:
    """The settings with which `compose` gives this configuration again, as a plain tree.

    Interpolations are resolved; the proxy's key is left out.
    """
    wanted = {key: value for key, value in leaves(_resolved(config)) if key not in _SECRETS}
    kept: dict[str, Any] = {}
    found = dict(leaves(_resolved_defaults()))
    # Values that are defaults are needed where something else would be derived or filled in.
    while lacking := {
        key: value
        for key, value in wanted.items()
        if key not in kept and (key not in found or found[key] != value)
    }:
        kept |= lacking
        found = dict(leaves(_resolved(_filled_in(kept, config.trainer.device)[0])))
    return nested(kept)


def default_model_path() -> str:
    """verl's example model, the value of the key if the user has set none."""
    return str(_defaults().actor_rollout_ref.model.path)


def _filled_in(flat: Mapping[str, Any], device: str) -> tuple[DictConfig, list[str]]:
    """The defaults, the user's settings by dotted key, and the values that those leave open."""
    config = OmegaConf.merge(_defaults(), nested(flat))
    config.trainer.use_v1 = False
    lines = [USE_V1_LINE]
    lines += fill_in_critic(config, flat.keys())
    lines += fill_in_lora(config, flat.keys())
    lines += fill_in_collection(config, flat.keys())
    lines += fill_in_batches(config, flat.keys())
    lines += choose_attention(config, flat.keys(), device)
    lines += fit_micro_batches(config, flat.keys())
    lines += attention_memory(config, device)
    if device == "cpu":
        lines += fill_in_cpu(config, flat.keys(), _unused_parts(config))
    return config, lines


def _unused_parts(config: DictConfig) -> tuple[str, ...]:
    parts = {
        "critic.": not config.critic.enable,
        "actor_rollout_ref.ref.": not needs_reference(config),
    }
    return tuple(part for part, is_unused in parts.items() if is_unused)


def _without_interpolations(flat: Mapping[str, Any], config: DictConfig) -> dict[str, Any]:
    return {
        key: _interpolated(config, key, value) if "${" in str(value) else value
        for key, value in flat.items()
    }


def _interpolated(config: DictConfig, key: str, value: Any) -> Any:
    try:
        found = OmegaConf.select(config, key)
        return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
    except OmegaConfBaseException as error:
        raise ValueError(f"{key}={value!r}: expected what can be filled in: {error}") from error


@cache
def _defaults() -> DictConfig:
    with initialize_config_module("verl.trainer.config", version_base=None):
        defaults = hydra_compose("ppo_trainer")
    OmegaConf.set_struct(defaults, False)
    return OmegaConf.merge(defaults, OmegaConf.load(OWN_CONFIG))


@cache
def _resolved_defaults() -> dict[str, Any]:
    return _resolved(_defaults())


def _resolved(config: DictConfig) -> dict[str, Any]:
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)
    return plain
