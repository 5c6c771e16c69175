"""Read the sizes of a model from its Hugging Face configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agl_fast.model_facts import tree_refusals, uneven_layers

_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
# Model types whose MLP has two matrices; the others have a gate as well.
_WITHOUT_GATE = {"codegen", "gpt_neox", "nemotron", "persimmon", "phi", "starcoder2"}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Fields that make some layers differ, with the value of models without them.
_UNEVEN = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "first_k_dense_replace": 0,
    "n_shared_experts": 0,
}


class ModelConfigError(ValueError):
    """A field of the configuration is missing or wrong, or the model is not supported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder with equal layers and full causal attention.

    Attributes:
        hidden, layers, heads, key_heads, head_width, vocabulary: sizes.
        inner: intermediate size of a layer's MLP; with experts, the sum of the active ones.
        stored_inner: the sum over all experts.
        inner_matrices: number of hidden × inner matrices.
        tied: whether the lm_head is the embedding.
        tree_refusals: why level tree does not support the model; empty if it does.
    """

    hidden: int
    layers: int
    heads: int
    key_heads: int
    head_width: int
    inner: int
    stored_inner: int
    inner_matrices: int
    vocabulary: int
    tied: bool
    tree_refusals: tuple[str, ...] = ()

    @property
    def layer_parameters(self) -> int:
        """Active weights of one layer.

        Biases, norms and routers are not counted (less than 1 %).
        """
        return self._layer_parameters(self.inner)

    @property
    def head_parameters(self) -> int:
        return self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        ends = 1 if self.tied else 2
        of_layer = self._layer_parameters(self.stored_inner)
        return self.layers * of_layer + ends * self.head_parameters

    def _layer_parameters(self, inner: int) -> int:
        attention = 2 * self.hidden * self.head_width * (self.heads + self.key_heads)
        return attention + self.inner_matrices * self.hidden * inner


def read_model_shape(path: str | os.PathLike[str]) -> ModelShape:
    """Read a model's sizes from its configuration, without its weights.

    Args:
        path: of a config.json, or of its folder.

    Raises:
        OSError: the file cannot be read.
        ModelConfigError: not the configuration of a plain decoder; the message names the field.
    """
    path, config = _read(path)
    try:
        return _shape(config)
    except ModelConfigError as error:
        raise ModelConfigError(f"{path}: {error}") from None


def read_tree_refusals(path: str | os.PathLike[str]) -> list[str]:
    """Why a model cannot be trained at level tree; arguments and errors as `read_model_shape`."""
    return tree_refusals(_as_transformers_reads_it(_read(path)[1]))


def _read(path: str | os.PathLike[str]) -> tuple[Path, dict[str, Any]]:
    path = Path(path)
    if path.is_dir():
        path /= "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelConfigError(f"{path}: expected an object, got {config!r}")
    return path, config


def _shape(config: Mapping[str, Any]) -> ModelShape:
    model = _as_transformers_reads_it(config)
    _refuse_others(config, model)
    hidden, layers, heads, vocabulary = (_size(config, name) for name in _REQUIRED)
    key_heads = _size(config, "num_key_value_heads", heads)
    if heads % key_heads:
        raise ModelConfigError(
            f"num_key_value_heads: expected a divisor of num_attention_heads={heads}, got "
            f"{key_heads}"
        )
    inner, stored_inner = _inner(config)
    tied = config.get("tie_word_embeddings", True)
    if not isinstance(tied, bool):
        raise ModelConfigError(f"tie_word_embeddings: expected true or false, got {tied!r}")
    return ModelShape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        key_heads=key_heads,
        head_width=_size(config, "head_dim", hidden // heads),
        inner=inner,
        stored_inner=stored_inner,
        inner_matrices=2 if config.get("model_type") in _WITHOUT_GATE else 3,
        vocabulary=vocabulary,
        tied=tied,
        tree_refusals=tuple(tree_refusals(model)),
    )


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        if default is None:
            raise ModelConfigError(f"{name}: missing; there are {', '.join(sorted(config))}")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelConfigError(f"{name}: expected a whole number of at least 1, got {value!r}")
    return value


def _inner(config: Mapping[str, Any]) -> tuple[int, int]:
    """Intermediate size of a layer's MLP: of the active experts, and of all."""
    experts = next((_size(config, name) for name in _EXPERTS if config.get(name)), 1)
    if experts == 1:
        inner = _size(config, "intermediate_size")
        return inner, inner
    for name, value in _UNEVEN.items():
        if config.get(name, value) not in (None, value):
            raise ModelConfigError(f"{name}={config[name]}: expected layers of equal experts alone")
    of_expert = "moe_intermediate_size"
    each = _size(config, of_expert if config.get(of_expert) else "intermediate_size")
    of_shared = "shared_expert_intermediate_size"
    shared = _size(config, of_shared) if config.get(of_shared) else 0
    passed = _size(config, "num_experts_per_tok")
    if passed > experts:
        raise ModelConfigError(
            f"num_experts_per_tok: expected at most {experts}, as there are experts, got {passed}"
        )
    return passed * each + shared, experts * each + shared


def _refuse_others(config: Mapping[str, Any], model: Any) -> None:
    """Refuse models whose layers have other costs."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list | None):
        raise ModelConfigError(f"layer_types: expected a list, got {kinds!r}")
    reasons = uneven_layers(model)
    if reasons:
        raise ModelConfigError(
            f"model_type={config.get('model_type')!r} has {', '.join(reasons)}: expected a decoder "
            f"of full causal attention and equal layers, as costs are known of these alone"
        )


def _as_transformers_reads_it(config: Mapping[str, Any]) -> Any:
    """Add the defaults of the model type, if transformers knows it."""
    try:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig
    except ImportError:
        return config
    try:
        return AutoConfig.for_model(**config)
    except (AttributeError, KeyError, TypeError, ValueError, StrictDataclassError):
        return config
