"""Which attention trains the models on GPUs: flash-attn, agl_fast's own, or torch's.

verl's default, flash_attention_2, needs the package flash-attn, which no index has built for the
torch of verl 0.9.1. Without it verl's workers end with an ImportError; with torch's attention in
its place, verl computes log-probs token by token.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Collection
from typing import Any

from omegaconf import DictConfig, OmegaConf
from transformers import AutoConfig
from verl.utils.model import update_model_config

from agl_fast.rows.levels import Level
from agl_fast.tree.engine_name import ENGINE
from agl_fast.tree.refusals import engine_refusals, fallback_attention, model_refusals
from agl_fast.verl.gpu_cards import cards

IMPLEMENTATION = "override_config.attn_implementation"
PACKAGE = "flash_attn"
FLASH_CAPABILITY = (8, 0)
ACTOR, CRITIC = "actor_rollout_ref.model", "critic.model"


def choose_attention(config: DictConfig, user_keys: Collection[str], device: str) -> list[str]:
    """Name the attention of actor and critic where the user has not and flash-attn is missing.

    Args:
        config: changed in place; its `critic.enable` is decided.
        user_keys: dotted keys that the user has set.
        device: verl's name of the run's device.

    Returns:
        For each model one line: what was chosen, why, and how to get flash-attn.

    Raises:
        ValueError: what the user asks for needs flash-attn, or agl_fast's attention does not fit
            the model. The message names the key, its value and what is expected.
    """
    lines = []
    for group in (ACTOR, CRITIC) if config.critic.enable else (ACTOR,):
        key = f"{group}.{IMPLEMENTATION}"
        chosen = OmegaConf.select(config, key)
        if Level.of(config.agentlightning.trace_aggregator.level).is_tree:
            OmegaConf.update(config, key, ENGINE, force_add=True)
            if chosen not in (None, ENGINE):
                lines.append(f"{key}={ENGINE} in place of {chosen}: level 'tree' has no other")
        elif chosen == ENGINE:
            if reasons := _refusals(config, group, device):
                raise ValueError(f"{key}={ENGINE!r}: expected 'sdpa', as {'; '.join(reasons)}")
        elif chosen is None and device == "cuda" and (fault := flash_attention_fault()):
            lines.append(_without_flash_attention(config, user_keys, group, fault))
    return lines


def uses_engine(config: Any, group: str = ACTOR) -> bool:
    """Whether agl_fast's engine for trees trains the model of a group."""
    return bool(
        Level.of(config.agentlightning.trace_aggregator.level).is_tree
        or OmegaConf.select(config, f"{group}.{IMPLEMENTATION}") == ENGINE
    )


def flash_attention_fault() -> str | None:
    """Why flash-attn cannot be used here; None: it can.

    A package that is there and does not load was built for another torch. The GPUs of this machine
    are asked through `nvidia-smi`: CUDA, once started here, could not be used by forked runners.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        return "flash-attn is not installed"
    try:
        importlib.import_module(PACKAGE)
    except (ImportError, OSError) as error:
        return f"flash-attn does not load ({str(error).strip().splitlines()[0]})"
    for name, capability in gpus().items():
        if capability < FLASH_CAPABILITY:
            return f"flash-attn needs compute capability 8.0, and {name} has {_shown(capability)}"
    return None


def gpus() -> dict[str, tuple[int, int]]:
    """Compute capabilities of this machine's NVIDIA cards, by name."""
    return {card.name: card.capability for card in cards()}


def flash_attention_requirement() -> str:
    """What verl names for itself, 'flash-attn==…'; without a version where it names none."""
    for requirement in importlib.metadata.requires("verl") or []:
        if match := re.match(r"flash-attn==[\w.]+", requirement):
            return match[0]
    return "flash-attn"


def _without_flash_attention(
    config: DictConfig, user_keys: Collection[str], group: str, fault: str
) -> str:
    engine = _engine_group(config, group)
    key = f"{group}.{IMPLEMENTATION}"
    n_ulysses = max(each.get("ulysses_sequence_parallel_size") or 1 for each in engine)
    if n_ulysses > 1:
        raise ValueError(
            f"ulysses_sequence_parallel_size={n_ulysses} of {group}: expected 1, as {fault}; "
            f"Ulysses needs it ({_how_to_get_it()})"
        )
    reasons = _refusals(config, group, "cuda")
    if not reasons:
        OmegaConf.update(config, key, ENGINE, force_add=True)
        return (
            f"{key}={ENGINE}: {fault}, so agl_fast's attention trains on rows without padding "
            f"(docs/tree_training.md), with the same log-probs; {_how_to_get_it()}"
        )
    attention = fallback_attention(_model(config, group))
    OmegaConf.update(config, key, attention, force_add=True)
    changes = [f"{key}={attention}"]
    if f"{group}.use_remove_padding" not in user_keys:
        OmegaConf.update(config, f"{group}.use_remove_padding", False)
        changes.append(f"{group}.use_remove_padding=false")
    return (
        f"{', '.join(changes)}: {fault}, and agl_fast's attention does not fit "
        f"({'; '.join(reasons)}); torch's is slower, and every row of a micro-batch is as long as "
        f"the longest; {_how_to_get_it()}"
    )


def _refusals(config: DictConfig, group: str, device: str) -> list[str]:
    model = _model(config, group)
    model_group = OmegaConf.select(config, group)
    engines = _engine_group(config, group)
    options = {
        "ulysses_sequence_parallel_size": max(
            each.get("ulysses_sequence_parallel_size") or 1 for each in engines
        ),
        "pad_to_length": engines[0].get("pad_to_length"),
        "strategy": engines[-1].strategy,
    }
    reasons = engine_refusals(model_group, options)
    if device == "cuda":
        reasons += [
            f"{name} has compute capability {_shown(capability)}, and Triton needs 8.0"
            for name, capability in gpus().items()
            if capability < FLASH_CAPABILITY
        ]
    if model is not None:
        reasons += model_refusals(model, device=device)
    return reasons


def _engine_group(config: DictConfig, group: str) -> tuple[Any, Any]:
    """The options of a model's engine, and the part they belong to, whose own come first."""
    if group == CRITIC:
        return config.critic.fsdp, config.critic
    actor = config.actor_rollout_ref.actor
    return actor.fsdp_config, actor


def _model(config: DictConfig, group: str) -> Any:
    """Its Hugging Face configuration; None where it cannot be had here."""
    settings = OmegaConf.to_container(OmegaConf.select(config, group), resolve=True)
    path = settings.get("hf_config_path") or settings.get("path")
    if path is None or "://" in path:
        return None
    try:
        model = AutoConfig.from_pretrained(
            path, trust_remote_code=bool(settings.get("trust_remote_code"))
        )
    except (OSError, ValueError):
        return None  # named by check_model, or by verl once it loads the model
    overrides = {
        key: value
        for key, value in (settings.get("override_config") or {}).items()
        if key != "attn_implementation"
    }
    update_model_config(model, override_config_kwargs=overrides)
    return model


def _how_to_get_it() -> str:
    return (
        f"to train with flash-attn, install it: uv pip install --no-build-isolation "
        f"'{flash_attention_requirement()}' (compiles with nvcc), or a wheel of its releases"
    )


def _shown(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
