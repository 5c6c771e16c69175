"""Read the sizes of a model from its Hugging Face configuration, without its weights."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agl_fast.model_facts import matrix_sizes, tree_refusals, uneven_layers

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_ATTENTION = re.compile(r"att(?:n|ention)")


class ModelConfigError(ValueError):
    """A field of the configuration is missing or wrong, or the model is not supported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder with full causal attention.

    Weights are those of matrices; biases, norms and routers are not counted (less than 1 %).

    Attributes:
        hidden, layers, heads, key_heads, head_width, vocabulary: sizes.
        inner: intermediate size of the widest MLP; with experts, the sum of the active ones.
        inner_matrices: number of hidden × inner matrices.
        layer_parameters: weights of all layers that a token uses: of its active experts.
        parameters: all weights.
        tree_refusals: why level tree does not support the model; empty if it does.
    """

    hidden: int
    layers: int
    heads: int
    key_heads: int
    head_width: int
    vocabulary: int
    inner: int
    inner_matrices: int
    layer_parameters: int
    parameters: int
    tree_refusals: tuple[str, ...] = ()

    @property
    def head_parameters(self) -> int:
        return self.hidden * self.vocabulary


def read_model_shape(path: str | os.PathLike[str]) -> ModelShape:
    """Build a model on torch's meta device from its configuration, and count its weights.

    Args:
        path: of a config.json, or of its folder.

    Raises:
        OSError: the file cannot be read.
        ModelConfigError: not the configuration of a decoder with full causal attention, or
            transformers is not installed; the message names the field.
    """
    path, config = _read(path)
    try:
        return shape_of(config)
    except ModelConfigError as error:
        raise ModelConfigError(f"{path}: {error}") from None


def read_tree_refusals(path: str | os.PathLike[str]) -> list[str]:
    """Why a model cannot be trained at level tree; arguments and errors as `read_model_shape`."""
    return tree_refusals(_read(path)[1])


def shape_of(config: Any) -> ModelShape:
    """Sizes of the model that transformers builds from a configuration.

    Raises:
        ModelConfigError: as for `read_model_shape`.
    """
    reasons = uneven_layers(config)
    if reasons:
        raise ModelConfigError(
            f"model_type={config.model_type!r} has {', '.join(reasons)}: expected a decoder of "
            "full causal attention, as costs are known of these alone"
        )
    text = config.get_text_config()
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    hidden, layers, heads, vocabulary = (_size(text, name) for name in names)
    key_heads = _size(text, "num_key_value_heads", heads)
    if heads % key_heads:
        raise ModelConfigError(
            f"num_key_value_heads: expected a divisor of num_attention_heads={heads}, got "
            f"{key_heads}"
        )
    head_width = _size(text, "head_dim", hidden // heads)
    experts = next((_size(text, name) for name in _EXPERTS if getattr(text, name, None)), 1)
    active = _size(text, "num_experts_per_tok") if experts > 1 else 1
    if active > experts:
        raise ModelConfigError(
            f"num_experts_per_tok: expected at most {experts}, as there are experts, got {active}"
        )
    try:
        matrices = matrix_sizes(config)
    except ValueError as error:
        raise ModelConfigError(str(error)) from None
    in_layers = {name: size for name, size in matrices.items() if _LAYER.search(name)}
    used = {
        name: size * active // experts if ".experts." in name else size
        for name, size in in_layers.items()
    }
    if not in_layers:
        raise ModelConfigError(f"model_type={config.model_type!r}: its layers have other names")
    inner, inner_matrices = _inner(used, hidden)
    return ModelShape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        key_heads=key_heads,
        head_width=head_width,
        vocabulary=vocabulary,
        inner=inner,
        inner_matrices=inner_matrices,
        layer_parameters=sum(used.values()),
        parameters=sum(matrices.values()),
        tree_refusals=tuple(tree_refusals(config)),
    )


def _inner(used: dict[str, int], hidden: int) -> tuple[int, int]:
    """Intermediate size of the widest layer's MLP, and its number of hidden × inner matrices.

    Matrices of an MLP may be fused (gate and up): the smallest one has the intermediate size.
    """
    widths: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for name, size in used.items():
        layer = _LAYER.search(name)
        if layer is not None and not _ATTENTION.search(name):
            part = name.removesuffix(".weight").rpartition(".")[0]
            widths[layer[1]][part].append(size // hidden)
    widest = max(widths.values(), key=lambda parts: sum(map(sum, parts.values())))
    inner = sum(map(min, widest.values()))
    return inner, round(sum(map(sum, widest.values())) / inner)


def _read(path: str | os.PathLike[str]) -> tuple[Path, Any]:
    """Read a configuration as transformers does, with the defaults of its model type."""
    path = Path(path)
    if path.is_dir():
        path /= "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelConfigError(f"{path}: expected an object, got {config!r}")
    if not isinstance(config.get("model_type"), str):
        raise ModelConfigError(f"{path}: model_type: expected a string")
    try:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig
    except ImportError:
        raise ModelConfigError(f"{path}: reading a model needs transformers") from None
    try:
        return path, AutoConfig.from_pretrained(path)
    except (AttributeError, KeyError, TypeError, ValueError, StrictDataclassError) as error:
        raise ModelConfigError(f"{path}: {' '.join(str(error).split())}") from None


def _size(config: Any, name: str, default: int | None = None) -> int:
    value = getattr(config, name, None)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelConfigError(f"{name}: expected a whole number of at least 1, got {value!r}")
    return value
