"""Estimate the cost of an update with a level's rows from sizes alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from agl_fast.rows.levels import Level

if TYPE_CHECKING:
    from agl_fast.tools.analyze.layouts import Layout
    from agl_fast.tools.analyze.model_shape import ModelShape

MICRO_BATCH_TOKENS = 16384
# Per parameter: weight, gradient and Adam's two moments in float32, as in verl's FSDP.
# "ZeRO" (arXiv 1910.02054, section 3.1) counts 16 bytes as well, for 16-bit weights with a copy.
STATE_BYTES = 16
_FLOAT32 = 4
# Logits that level tree computes at a time: agl_fast.tree.scores.LOGITS_AT_ONCE.
LOGITS_AT_ONCE = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Hardware and settings of the estimates.

    Attributes:
        micro_batch_tokens: tokens per micro-batch.
        tflops: achieved TFLOP/s of all GPUs together; None: no estimate of time.
        activation_bytes: bytes per activation value, 2 in bfloat16.
    """

    micro_batch_tokens: int = MICRO_BATCH_TOKENS
    tflops: float | None = None
    activation_bytes: int = 2

    def __post_init__(self) -> None:
        if self.micro_batch_tokens < 1:
            raise ValueError(
                f"micro_batch_tokens must be at least 1, got {self.micro_batch_tokens}"
            )
        if self.tflops is not None and not 0 < self.tflops < inf:
            raise ValueError(f"tflops must be more than 0, and finite, got {self.tflops}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Cost of one forward and backward pass over all rows of a level.

    Attributes:
        flops, flops_recomputed: without and with gradient checkpointing.
        seconds, seconds_recomputed: likewise; None if the speed is unknown.
        activation_bytes, activation_bytes_recomputed: peak of the largest micro-batch.
        micro_batch: tokens of the largest micro-batch.
    """

    flops: int
    flops_recomputed: int
    seconds: float | None
    seconds_recomputed: float | None
    activation_bytes: int
    activation_bytes_recomputed: int
    micro_batch: int


def costs_of(layout: Layout, model: ModelShape, hardware: Hardware) -> Costs:
    plain, recomputed = (flops(layout, model, recomputed=each) for each in (False, True))
    speed = None if hardware.tflops is None else hardware.tflops * 1e12
    micro_batch = max(layout.longest_row, min(hardware.micro_batch_tokens, layout.tokens))
    return Costs(
        flops=plain,
        flops_recomputed=recomputed,
        seconds=None if speed is None else plain / speed,
        seconds_recomputed=None if speed is None else recomputed / speed,
        activation_bytes=_activation_bytes(layout, model, hardware, micro_batch, False),
        activation_bytes_recomputed=_activation_bytes(layout, model, hardware, micro_batch, True),
        micro_batch=micro_batch,
    )


def flops(layout: Layout, model: ModelShape, *, recomputed: bool) -> int:
    """Floating-point operations (additions and products) of a forward and a backward pass::

        6 · weights of the layers · tokens
        + 12 · layers · heads · head width · attended
        + 6 · hidden · vocabulary · scored

    The first term is that of Kaplan et al. 2020 (arXiv 2001.08361, section 2.1: 2 a weight and
    token forward, 4 backward). The second is 12·L·H·Q·T of Chowdhery et al. 2022 (PaLM, arXiv
    2204.02311, appendix B) with the T of each token counted: what a token attends to is itself and
    what is before it, or above it in a tree. The third is the first for the lm_head, where logits
    are computed.

    Gradient checkpointing computes the layers' forward pass again: 8 and 16. Level tree computes
    its logits again: 8. Embeddings, norms, softmax and the optimiser's step are left out.
    """
    passes = 4 if recomputed else 3  # a backward pass is two forward passes
    attention = 4 * model.layers * model.heads * model.head_width * layout.attended
    matrices = 2 * model.layer_parameters * layout.tokens
    passes_of_head = 4 if Level.of(layout.level).is_tree else 3
    head = 2 * model.head_parameters * layout.scored
    return passes * (matrices + attention) + passes_of_head * head


def state_bytes(model: ModelShape) -> int:
    """Bytes of weights, gradients and Adam's moments, all GPUs together."""
    return STATE_BYTES * model.parameters


def _activation_bytes(
    layout: Layout, model: ModelShape, hardware: Hardware, micro_batch: int, recomputed: bool
) -> int:
    """Peak activation memory of one micro-batch.

    Counted as Korthikanti et al. 2022 do (arXiv 2205.05198, section 4.1), for a layer with
    grouped keys, a gated MLP, attention that keeps no scores, and norms in float32. On top come
    logits with their gradient, or after them an MLP's gradients. With gradient checkpointing every
    layer keeps its input, and one layer's activations are there at a time.
    """
    size = hardware.activation_bytes
    inner = 2 * (model.inner_matrices - 1)  # gate, up, the activation, their product
    of_layer = micro_batch * (
        # of two norms: the input as float32, normalised, scaled
        2 * model.hidden * (_FLOAT32 + 2 * size)
        # query, key, value, and what attention gives
        + 2 * model.head_width * (model.heads + model.key_heads) * size
        + inner * model.inner * size
    )
    scored = -(-layout.scored * micro_batch // max(1, layout.tokens))
    logits = scored * model.vocabulary
    if Level.of(layout.level).is_tree:
        # as computed, in float32, and the gradients of both
        logits_bytes = min(logits, LOGITS_AT_ONCE) * 2 * (size + _FLOAT32)
    else:
        logits_bytes = 2 * logits * size
    gradients = model.inner_matrices * micro_batch * model.inner * size
    if not recomputed:
        return model.layers * of_layer + max(gradients, logits_bytes)
    inputs = model.layers * micro_batch * model.hidden * size
    return inputs + max(of_layer + gradients, logits_bytes)
