"""The configuration of a run: verl's defaults, agl_fast's, then the user's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from verl.utils.config import validate_config

from agl_fast.rows.options import config_keys
from agl_fast.verl.config import OWN_CONFIG
from agl_fast.verl.config.attention_choice import (
    attention_memory,
    can_read_models,
    choose_attention,
)
from agl_fast.verl.config.batch_limits import check_batches, fill_in_batches, fit_micro_batches
from agl_fast.verl.config.checks import check_combinations
from agl_fast.verl.config.choices import check_choices
from agl_fast.verl.config.cpu_defaults import fill_in, fit_bucket
from agl_fast.verl.config.effects import check_effects, move_values
from agl_fast.verl.config.lora import merge_adapters, uses_lora
from agl_fast.verl.config.renamed_keys import leaves, nested, rename
from agl_fast.verl.config.servers import tell_servers
from agl_fast.verl.config.types import check_types
from agl_fast.verl.config.user_input import plain_settings
from agl_fast.verl.device_choice import choose_device, use_device

HOOK = "agentlightning.rollout_hook"
_SECRETS = ("agentlightning.proxy.api_key",)
USE_V1_LINE = (
    "trainer.use_v1=false: agl_fast's rows go through verl's RayPPOTrainer; the V1 trainer takes "
    "its batches from a queue that verl's own agent loops fill"
)


@dataclass(frozen=True)
class Composed:
    """A checked configuration.

    Attributes:
        config: interpolations are not resolved yet.
        lines: what the user should read: keys that moved, values that were filled in.
        open_keys: the user's dotted keys, for `decide_with_model`, where a model is not on this
            machine; None: nothing is left to decide.
    """

    config: DictConfig
    lines: list[str]
    open_keys: frozenset[str] | None = None


def compose(
    settings: Mapping[str, Any], *, device: str | None = None, added: Collection[str] = ()
) -> Composed:
    """Lay the user's settings over verl's `ppo_trainer` defaults and agl_fast's `config.yaml`.

    Args:
        settings: a tree of overrides, as plain values or an OmegaConf. A key that neither verl nor
            agl_fast has is written with a plus before its name, as in hydra.
        device: verl's name of the device; None: it is chosen, and verl in this process uses it.
        added: further dotted keys that need not be known, as those of an earlier run.

    Raises:
        TypeError: a setting has the wrong type.
        ValueError: a setting, or a combination, cannot work. Both name the key, its value and what
            is expected.
    """
    if not isinstance(settings, Mapping):
        raise TypeError(
            f"config={settings!r}: expected a mapping of settings, got {type(settings).__name__}"
        )
    plain, marked = plain_settings(settings)
    flat, lines = rename(dict(leaves(plain)))
    if callable(flat.get(HOOK)):
        raise TypeError(
            f"{HOOK}={flat[HOOK]!r}: expected its name, 'module:function', as the processes of a "
            "run import it"
        )
    given = nested(_without_interpolations(flat, OmegaConf.merge(_defaults(), nested(flat))))
    check_types(given, _resolved_defaults(), marked.union(added))
    flat, copied = move_values(flat)

    if device is None:
        chosen = choose_device(flat)
        use_device(chosen.name)
        device = chosen.name
        lines += chosen.lines
    config, filled_in = _filled_in(flat, device)
    lines += copied + filled_in
    lines += check_effects(
        dict(leaves(given)), dict(leaves(_resolved_defaults())), _parts_of_the_run(config)
    )
    config.actor_rollout_ref.actor.loss_scale_factor = _loss_scale_factor(config)

    check_choices(config)
    check_batches(config)
    lines += check_combinations(config)
    lines += tell_servers(config)
    _check_with_verl(config)
    open_keys = None if can_read_models(config, local_only=True) else frozenset(flat)
    return Composed(config, lines, open_keys)


def decide_with_model(config: DictConfig, user_keys: Collection[str]) -> list[str]:
    """Decide what `compose` left open, as the model was not on this machine.

    Its configuration is asked of the Hugging Face hub, which the run needs as well.

    Args:
        config: changed in place.
        user_keys: `Composed.open_keys`.

    Returns:
        What the user should read.

    Raises:
        ValueError: the model does not fit the settings.
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


def _filled_in(flat: Mapping[str, Any], device: str) -> tuple[DictConfig, list[str]]:
    """The defaults, the user's settings by dotted key, and what those leave open; what to say."""
    config = OmegaConf.merge(_defaults(), nested(flat))
    config.trainer.use_v1 = False
    lines = [USE_V1_LINE]
    if config.critic.enable is None:
        config.critic.enable = config.algorithm.adv_estimator == "gae"
    if uses_lora(config):
        lines += merge_adapters(config, flat.keys())
    if config.critic.enable and "critic.model.path" not in flat:
        config.critic.model.path = "${actor_rollout_ref.model.path}"
        lines.append("critic.model.path is not set: the critic starts from the actor's model")
    lines += fill_in_batches(config, flat.keys())
    lines += choose_attention(config, flat.keys(), device)
    lines += fit_micro_batches(config, flat.keys())
    lines += attention_memory(config, device)
    if device == "cpu":
        lines += fill_in(config, flat.keys(), _unused_parts(config))
        lines += fit_bucket(config, flat.keys())
    return config, lines


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


def default_model_path() -> str:
    """verl's own example, which stands where the user has set no model."""
    return str(_defaults().actor_rollout_ref.model.path)


@cache
def _resolved_defaults() -> dict[str, Any]:
    return _resolved(_defaults())


def _resolved(config: DictConfig) -> dict[str, Any]:
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)
    return plain


def _needs_reference(config: DictConfig) -> bool:
    return bool(config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss)


def _parts_of_the_run(config: DictConfig) -> set[str]:
    parts = {"critic": config.critic.enable, "reference": _needs_reference(config)}
    return {part for part, is_there in parts.items() if is_there}


def _unused_parts(config: DictConfig) -> tuple[str, ...]:
    parts = {
        "critic.": not config.critic.enable,
        "actor_rollout_ref.ref.": not _needs_reference(config),
    }
    return tuple(part for part, is_unused in parts.items() if is_unused)


def _loss_scale_factor(config: DictConfig) -> int:
    """What `seq-mean-token-sum-norm` divides by: the configured width, whatever a batch has."""
    configured = config.actor_rollout_ref.actor.loss_scale_factor
    keys = config_keys(config.agentlightning.trace_aggregator.level)
    width = OmegaConf.select(config, keys["max_response_length"])
    return int(width if configured is None else configured)


def _check_with_verl(config: DictConfig) -> None:
    resolved = OmegaConf.create(_resolved(config))
    # verl would load the model's files to build this group; whoever trains loads them later.
    del resolved.critic.model
    try:
        validate_config(
            config=resolved,
            use_reference_policy=_needs_reference(config),
            use_critic=config.critic.enable,
        )
    except (AssertionError, ValueError, InstantiationException) as error:
        cause = error.__cause__ or error
        raise ValueError(f"verl refuses the configuration: {cause}") from error
