"""Attention implementation on GPUs: flash-attn, agl_fast's own, or torch's.

verl's default, flash_attention_2, needs the package flash-attn. No package index has a build for
the torch of verl 0.9.1. Without it, verl's workers end with an ImportError; with torch's attention,
verl computes log-probs token by token.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Collection, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from transformers import AutoConfig
from verl.utils.model import update_model_config

from agl_fast.rows.levels import Level
from agl_fast.tree.engine_name import ENGINE
from agl_fast.tree.refusals import engine_refusals, fallback_attention, model_refusals
from agl_fast.verl.config.batch_limits import longest_row
from agl_fast.verl.gpu_cards import cards
from agl_fast.verl.model_files import model_folder

IMPLEMENTATION = "override_config.attn_implementation"
PACKAGE = "flash_attn"
FLASH_CAPABILITY = (8, 0)
ACTOR, CRITIC = "actor_rollout_ref.model", "critic.model"
# Bytes for each pair of positions in a row, in bfloat16. sdpa: the mask, and what each layer makes
# of it; eager: scores of each head, their float32 softmax and its copy.
MASK_BYTES, BIAS_BYTES, SCORE_BYTES = 1, 2, 8
MUCH_GIB = 1.0


def choose_attention(
    config: DictConfig, user_keys: Collection[str], device: str, *, local_only: bool = True
) -> list[str]:
    """Choose the attention of actor and critic if the user has not and flash-attn is missing.

    A second call decides only what the first one left open.

    Args:
        config: changed in place; its `critic.enable` is decided.
        user_keys: dotted keys that the user has set.
        device: verl's name of the run's device.
        local_only: leave the choice open if the model's configuration is not on this machine; else
            download it from the Hugging Face hub, and choose the tree engine if that fails.

    Returns:
        For each changed model one line: the choice, its reason, and how to get flash-attn.

    Raises:
        ValueError: the user's choice needs flash-attn, or agl_fast's attention does not support
            the model. The message names key, value and expectation.
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
            model = _model(config, group, local_only=local_only)
            if reasons := _refusals(config, group, device, model):
                raise ValueError(f"{key}={ENGINE!r}: expected 'sdpa', as {'; '.join(reasons)}")
        elif chosen is None and device == "cuda" and (fault := flash_attention_fault()):
            lines.append(_without_flash_attention(config, user_keys, group, fault, local_only))
    return lines


def can_read_models(config: DictConfig, *, local_only: bool) -> bool:
    """Whether the configurations of all trained models can be read.

    Args:
        local_only: only on this machine; else missing ones are downloaded from the Hugging Face
            hub, and are on this machine afterwards.
    """
    groups = (ACTOR, CRITIC) if config.critic.enable else (ACTOR,)
    found = [_model(config, group, local_only=local_only) for group in groups]
    return all(model is not None for model in found)


def uses_engine(config: Any, group: str = ACTOR) -> bool:
    """Whether the tree engine trains the model of a group."""
    return bool(
        Level.of(config.agentlightning.trace_aggregator.level).is_tree
        or OmegaConf.select(config, f"{group}.{IMPLEMENTATION}") == ENGINE
    )


def flash_attention_fault() -> str | None:
    """Reason why flash-attn cannot be used here; None: it can.

    An installed package that does not load was built for another torch. `nvidia-smi` lists the
    GPUs: after an initialisation of CUDA here, forked runners could not use it.
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
    """verl's own requirement, 'flash-attn==…'; without a version if verl has none."""
    for requirement in importlib.metadata.requires("verl") or []:
        if match := re.match(r"flash-attn==[\w.]+", requirement):
            return match[0]
    return "flash-attn"


def _without_flash_attention(
    config: DictConfig, user_keys: Collection[str], group: str, fault: str, local_only: bool
) -> str:
    engine = _engine_group(config, group)
    key = f"{group}.{IMPLEMENTATION}"
    n_ulysses = max(each.get("ulysses_sequence_parallel_size") or 1 for each in engine)
    if n_ulysses > 1:
        raise ValueError(
            f"ulysses_sequence_parallel_size={n_ulysses} of {group}: expected 1, as {fault}; "
            f"Ulysses needs it ({_how_to_get_it()})"
        )
    model = _model(config, group, local_only=local_only)
    if model is None and local_only:
        path = OmegaConf.select(config, f"{group}.path")
        return f"{key}: chosen when the run starts, as {fault} and {path} is not on this machine"
    reasons = _refusals(config, group, "cuda", model)
    if not reasons:
        OmegaConf.update(config, key, ENGINE, force_add=True)
        return (
            f"{key}={ENGINE}: {fault}, so agl_fast's attention trains on rows without padding "
            f"(docs/tree_training.md), with the same log-probs; {_how_to_get_it()}"
        )
    attention = fallback_attention(model)
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


def attention_memory(config: DictConfig, device: str) -> list[str]:
    """Memory of torch's attention for pairs of positions in a full micro-batch, if it is large.

    Args:
        config: its attention and its micro-batches are decided.
        device: verl's name of the run's device.

    Returns:
        A line for each model that is on this machine and takes `MUCH_GIB` or more.
    """
    lines = []
    for group in (ACTOR, CRITIC) if config.critic.enable else (ACTOR,):
        attention = OmegaConf.select(config, f"{group}.{IMPLEMENTATION}")
        if device != "cuda" or attention not in ("sdpa", "eager"):
            continue
        model = _model(config, group, local_only=True)
        if model is not None:
            lines += _much_memory(config, group, attention, model.get_text_config())
    return lines


def _much_memory(config: DictConfig, group: str, attention: str, model: Any) -> list[str]:
    settings = OmegaConf.select(config, group)
    rows, width = _full_micro_batch(config, group, model)
    n_kept = 1 if settings.enable_gradient_checkpointing else model.num_hidden_layers
    if attention == "eager":
        what, of_pair = "scores", model.num_attention_heads * SCORE_BYTES * n_kept
    else:
        what, of_pair = "masks", MASK_BYTES + BIAS_BYTES * n_kept
    gib = rows * width**2 * of_pair / 2**30
    if gib < MUCH_GIB:
        return []
    shape = f"{rows} row{'s' if rows > 1 else ''} of {width} tokens"
    return [
        f"{group}.{IMPLEMENTATION}={attention}: attention {what} of a micro-batch of {shape} take "
        f"{gib:.1f} GiB of a GPU. They grow with the square of a row's length: smaller limits of "
        "rows or micro-batches take less"
    ]


def _full_micro_batch(config: DictConfig, group: str, model: Any) -> tuple[int, int]:
    """Number of rows and tokens per row of a micro-batch of the longest rows.

    Without padding, torch's attention treats all tokens of a micro-batch as one row.
    """
    part = config.critic if group == CRITIC else config.actor_rollout_ref.actor
    longest, _ = longest_row(config)
    longest = min(longest, getattr(model, "max_position_embeddings", None) or longest)
    if part.use_dynamic_bsz:
        rows = max(1, part.ppo_max_token_len_per_gpu // longest)
    else:
        rows = part.ppo_micro_batch_size_per_gpu or 1
    if OmegaConf.select(config, group).use_remove_padding:
        return 1, rows * longest
    return rows, longest


def _refusals(config: DictConfig, group: str, device: str, model: Any) -> list[str]:
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
    """Options of a model's engine, and those of its part, which take precedence."""
    if group == CRITIC:
        return config.critic.fsdp, config.critic
    actor = config.actor_rollout_ref.actor
    return actor.fsdp_config, actor


def _model(config: DictConfig, group: str, *, local_only: bool) -> Any:
    """The Hugging Face configuration of a group's model; None if it is not available here."""
    settings = OmegaConf.to_container(OmegaConf.select(config, group), resolve=True)
    path = settings.get("hf_config_path") or settings.get("path")
    if path is None or "://" in path:
        return None
    folder = model_folder(path)
    model = None if folder is None else _loaded(str(folder), settings, local_only=True)
    if model is None and not local_only:
        model = _loaded(path, settings, local_only=False)
    if model is None:
        return None  # check_model reports it, or verl when it loads the model
    overrides = {
        key: value
        for key, value in (settings.get("override_config") or {}).items()
        if key != "attn_implementation"
    }
    update_model_config(model, override_config_kwargs=overrides)
    return model


def _loaded(path: str, settings: Mapping[str, Any], *, local_only: bool) -> Any:
    try:
        return AutoConfig.from_pretrained(
            path,
            trust_remote_code=bool(settings.get("trust_remote_code")),
            local_files_only=local_only,
        )
    except (OSError, ValueError):
        return None


def _how_to_get_it() -> str:
    return (
        f"to train with flash-attn, install it: uv pip install --no-build-isolation "
        f"'{flash_attention_requirement()}' (compiles with nvcc), or a wheel of its releases"
    )


def _shown(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
