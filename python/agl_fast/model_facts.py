"""What the kinds of models can and cannot do, for whoever trains on trees or estimates costs.

One table for both: `agl_fast.tree` refuses by it, and `agl_fast.tools.analyze` advises by it.
Names are those of transformers (`model_type`, and the fields of configurations); a test compares
the table with the installed version's causal language models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

# A Hugging Face configuration, or the object in a config.json.
Model: TypeAlias = Any
Get: TypeAlias = Callable[..., Any]

FULL_ATTENTION = "full_attention"
# Names of the matrices that choose experts.
_ROUTER = re.compile(r"(?:gate|router|gate\.wg|router\.classifier)(?:\.weight)?$")
# Their state runs along the row, and their configurations need not name it in layer_types.
_RECURRENT = frozenset(
    [
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "mamba",
        "mamba2",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "zamba",
        "zamba2",
    ]
)
# Their attention is not handed to transformers' attention functions.
NO_ATTENTION_FUNCTION = frozenset(
    [
        "bamba",
        "bart",
        "big_bird",
        "bigbird_pegasus",
        "biogpt",
        "blenderbot",
        "blenderbot-small",
        "bloom",
        "blt",
        "codegen",
        "cpmant",
        "ctrl",
        "diffllama",
        "falcon",
        "falcon_h1",
        "falcon_mamba",
        "git",
        "gpt_bigcode",
        "gpt_neo",
        "gpt_neox_japanese",
        "gptj",
        "jamba",
        "mamba",
        "mamba2",
        "marian",
        "mbart",
        "megatron-bert",
        "moshi",
        "mpt",
        "mvp",
        "nemotron",
        "nemotron_h",
        "olmo_hybrid",
        "openai-gpt",
        "pegasus",
        "plbart",
        "prophetnet",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "recurrent_gemma",
        "reformer",
        "rembert",
        "roformer",
        "rwkv",
        "stablelm",
        "trocr",
        "whisper",
        "xglm",
        "xlm",
        "xlnet",
        "xlstm",
        "zamba",
        "zamba2",
    ]
)
# They compute the logits of every token.
NO_LOGITS_TO_KEEP = frozenset(
    ["gemma4_assistant", "gemma4_unified_assistant", "prophetnet", "trocr", "whisper", "xlstm"]
)
# They compute masks from values and hand them to every layer.
_OWN_MASKS = frozenset({"doge"})
# They look at the tokens behind, unless their configuration says is_decoder.
_BIDIRECTIONAL = frozenset({"bert-generation"})
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attn_dropout")
_SCALES_OF_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
_ROPE_OF_LENGTH = frozenset({"dynamic", "longrope"})


def uneven_layers(model: Model) -> list[str]:
    """What makes layers other than full causal attention and an MLP each.

    Such layers cost something else, and look at places in the row instead of the tree.
    """
    return [reason for get in _parts(model) for reason in _of_layers(get)]


def tree_refusals(model: Model) -> list[str]:
    """Why a prefix tree would not train the model as its rows would; empty: it would.

    Args:
        model: its Hugging Face configuration, or the object in its config.json.
    """
    reasons = []
    for get in _parts(model):
        reasons += [
            *_of_layers(get),
            *_of_attention(get),
            *_of_positions(get),
            *_of_outputs(get),
        ]
    return list(dict.fromkeys(reasons))


def matrix_sizes(model: Any) -> dict[str, int]:
    """Count the weights of a causal language model by building it on torch's meta device.

    Args:
        model: its Hugging Face configuration.

    Returns:
        Number of weights of each matrix, by name; tied ones once, and no routers of experts.

    Raises:
        ValueError: transformers cannot build the model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(model)
    except Exception as error:  # the model's own code may raise anything for wrong fields
        raise ValueError(
            f"transformers cannot build model_type={model.model_type!r}: {error}"
        ) from None
    return {
        name: weights.numel()
        for name, weights in built.named_parameters()
        if weights.dim() > 1 and not _ROUTER.search(name)
    }


def _parts(model: Model) -> Iterator[Get]:
    """How to ask the configuration, and that of its language model where this is a part."""
    yield _getter(model)
    text = _getter(model)("text_config")
    if text is not None and text is not model:
        yield _getter(text)


def _getter(model: Model) -> Get:
    if isinstance(model, Mapping):
        return model.get
    return lambda name, default=None: getattr(model, name, default)


def _of_layers(get: Get) -> Iterator[str]:
    named = get("layer_types")
    kinds = set(named or [FULL_ATTENTION]) - {FULL_ATTENTION}
    for kind in sorted(map(str, kinds)):
        yield f"layers of the kind {kind!r}, which look at places in the row, not in the tree"
    if get("model_type") in _RECURRENT:
        yield "recurrent layers, whose state runs along the row"
    window = get("sliding_window")
    if window and get("use_sliding_window", True) and named is None:
        yield f"sliding_window={window} in every layer, which counts places in the row"
    if get("kv_lora_rank"):
        yield "latent attention (MLA), whose keys and values differ in width"
    if get("is_encoder_decoder"):
        yield "an encoder"
    is_bert = get("type_vocab_size") or get("model_type") in _BIDIRECTIONAL
    if is_bert and not get("is_decoder"):
        yield "attention to the tokens behind (is_decoder=False)"


def _of_attention(get: Get) -> Iterator[str]:
    for name in _DROPOUTS:
        if get(name):
            yield f"{name}={get(name)}: one token would be dropped for all calls at once"
    if get("attn_logit_softcapping"):
        yield "attn_logit_softcapping"
    if get("model_type") in NO_ATTENTION_FUNCTION:
        yield "attention of its own, which takes none of transformers' attention functions"
    if get("model_type") in _OWN_MASKS:
        yield "attention masks that it computes from values"


def _of_positions(get: Get) -> Iterator[str]:
    if get("vision_config") is not None:
        yield "images, whose tokens have several positions (M-RoPE)"
    rope = get("rope_parameters") or get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        return
    # Where kinds of layers differ in it, there is one for each.
    for each in [rope, *(value for value in rope.values() if isinstance(value, Mapping))]:
        if each.get("mrope_section"):
            yield "multi-dimensional positions (M-RoPE)"
        if each.get("rope_type") in _ROPE_OF_LENGTH:
            yield (
                f"rope_type={each['rope_type']!r}, which depends on the longest row of a "
                "micro-batch"
            )


def _of_outputs(get: Get) -> Iterator[str]:
    if get("model_type") in NO_LOGITS_TO_KEEP:
        yield "logits of every token (it takes no logits_to_keep)"
    if get("output_router_logits"):
        yield "a MoE auxiliary loss (output_router_logits), which counts tokens of rows"
    for name in _SCALES_OF_LOGITS:
        if get(name) not in (None, 1, 1.0):
            yield f"{name}, which is applied behind the lm_head"
