"""Models and settings that tree training does not support, detected before a run starts."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from verl.utils.config import omega_conf_to_dataclass

from agl_fast.model_facts import tree_refusals
from agl_fast.tree.engine_name import ENGINE

LEVEL = f"agentlightning.trace_aggregator.level='tree', or attn_implementation={ENGINE!r},"
# Triton requires tiles of at least this head width.
LEAST_HEAD_WIDTH = 16


def require_tree_model(model: Any) -> None:
    """Raise ValueError for a model whose attention a tree would change.

    Args:
        model: its Hugging Face configuration.
    """
    if reasons := tree_refusals(model):
        raise ValueError(
            f"{LEVEL} with a model of type {model.model_type!r}: it has {', '.join(reasons)}; "
            "expected a text model of full causal attention (Llama, Qwen2, Qwen3, …), or level "
            "'trajectory' with another attn_implementation"
        )


def model_refusals(model: Any, *, device: str) -> list[str]:
    """Reasons why agl_fast's attention does not support a model, without loading the model.

    Args:
        model: its Hugging Face configuration.
        device: verl's name of the device that trains it.
    """
    reasons = [f"model type {model.model_type!r} has {each}" for each in tree_refusals(model)]
    module_cls = _module_class(model)
    if module_cls is not None and not getattr(module_cls, "_supports_attention_backend", False):
        reasons.append(f"{module_cls.__name__} takes no attention functions")
    n_heads = getattr(model, "num_attention_heads", None)
    width = getattr(model, "head_dim", None) or (n_heads and model.hidden_size // n_heads)
    if device != "cpu" and width and width < LEAST_HEAD_WIDTH:
        reasons.append(f"heads of {width} elements, and flex attention takes {LEAST_HEAD_WIDTH}")
    return reasons


def fallback_attention(model: Any) -> str:
    """The attention implementation of transformers that supports a model.

    Args:
        model: its Hugging Face configuration; None if unknown.
    """
    if model is None:
        return "sdpa"
    module_cls = _module_class(model)
    takes_sdpa = module_cls is None or getattr(module_cls, "_supports_sdpa", True)
    # torch's function has no soft cap; transformers would silently ignore it.
    caps = getattr(model, "attn_logit_softcapping", None)
    return "sdpa" if takes_sdpa and not caps else "eager"


def require_tree_module(module: Any) -> None:
    """Raise ValueError for a model that does not support attention functions."""
    if not getattr(module, "_supports_attention_backend", False):
        raise ValueError(
            f"{LEVEL} with {type(module).__name__}: expected a model of transformers that takes "
            "attention functions"
        )


def require_language_module(module: Any) -> None:
    """Raise ValueError for a language model without `logits_to_keep`."""
    has_head = isinstance(module.get_output_embeddings(), torch.nn.Module)
    if not has_head or "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise ValueError(
            f"{LEVEL} with {type(module).__name__}: expected a model with an lm_head that takes "
            "logits_to_keep"
        )


def require_tree_engine(model: Any, engine: Any, part: str) -> None:
    """Raise ValueError for engine settings that are incompatible with trees.

    Args:
        model, engine: as for `engine_refusals`.
        part: name of the part that has these settings, for the message.
    """
    if wrong := engine_refusals(model, engine):
        raise ValueError(f"{LEVEL} with {part}'s {'; '.join(wrong)}")


def engine_refusals(model: Any, engine: Any) -> list[str]:
    """Engine settings that treat a row as one sequence.

    Args:
        model: verl's HFModelConfig, or its group of the configuration.
        engine: verl's FSDPEngineConfig, or its group of the configuration.
    """
    wrong = []
    if model.get("use_fused_kernels"):
        wrong.append(
            "use_fused_kernels=True: expected False, as they read a token's logits at the token "
            "before it"
        )
    n_ulysses = engine.get("ulysses_sequence_parallel_size") or 1
    if n_ulysses > 1:
        wrong.append(
            f"ulysses_sequence_parallel_size={n_ulysses}: expected 1, as Ulysses cuts a row into "
            "stretches of one sequence"
        )
    if engine.get("pad_to_length"):
        wrong.append("pad_to_length=True: expected False, as what fills up a row is in no tree")
    if engine.get("strategy") not in ("fsdp", "fsdp2"):
        wrong.append(
            f"strategy={engine.get('strategy')!r}: expected 'fsdp' or 'fsdp2', as others, Megatron "
            "among them, have no engine for trees"
        )
    return wrong


def require_tree_config(config: Any) -> None:
    """Raise ValueError for a run whose settings are incompatible with trees.

    Args:
        config: the whole configuration, resolved.
    """
    actor = config.actor_rollout_ref
    parts = {
        "actor": (actor.model, actor.actor.fsdp_config, actor.actor),
        "reference": (actor.model, actor.ref.fsdp_config, actor.ref),
    }
    if config.critic.enable:
        parts["critic"] = (config.critic.model, config.critic.fsdp, config.critic)
    for part, (model, engine, whole) in parts.items():
        # verl takes these from the part if they differ.
        n_ulysses = max(each.get("ulysses_sequence_parallel_size") or 1 for each in (engine, whole))
        of_engine = {
            "ulysses_sequence_parallel_size": n_ulysses,
            "pad_to_length": engine.get("pad_to_length"),
            "strategy": whole.strategy,
        }
        require_tree_engine(model, of_engine, part)
    require_tree_model(omega_conf_to_dataclass(actor.model).hf_config)


def _module_class(model: Any) -> Any:
    """The model class of a configuration in transformers; None for remote code."""
    if getattr(model, "auto_map", None):
        return None
    classes = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model), None)
    return classes[0] if isinstance(classes, tuple) else classes
