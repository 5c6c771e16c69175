"""Tree attention run by run, on a CPU.

Every token of a run sees all ancestors of the run and the run's tokens up to itself. So a run needs
one dense attention to its ancestors and one causal attention to itself, combined by their log-sums
of exponentials. Nothing is computed and then masked, and the backward pass saves only what plain
attention saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from agl_fast.tree.ancestors import Run

# Private operators of torch (2.6 to 2.13) behind its scaled_dot_product_attention on a CPU. The
# public function does not return the log-sums of exponentials, which combine the parts.
_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def segment_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    runs: Sequence[Run],
    scaling: float | None = None,
) -> torch.Tensor:
    """Attention of T tokens to themselves and their ancestors.

    Args:
        query: (1, H, T, D) of a floating dtype.
        key, value: (1, K, T, D), H a multiple of K.
        runs: of all T tokens (`ancestors.link`).
        scaling: factor on the dot products; None: 1 / √D.

    Returns:
        (1, T, H, D), contiguous.
    """
    attended: torch.Tensor = _SegmentAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, runs, scaling
    )
    return attended


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        runs: Sequence[Run],
        scaling: float | None,
    ) -> torch.Tensor:
        _, n_heads, n_tokens, width = query.shape
        heads = _Heads(n_heads // key.shape[1])
        output = query.new_empty(1, n_tokens, n_heads, width)
        precision = torch.promote_types(query.dtype, torch.float32)
        log_sums = query.new_empty(1, n_heads, n_tokens, dtype=precision)
        for run in runs:
            own = slice(run.start, run.stop)
            queries = query[:, :, own]
            result, log_sum = _attend(
                queries,
                heads.repeat(key[:, :, own]),
                heads.repeat(value[:, :, own]),
                is_causal=True,
                scale=scaling,
            )
            if run.above:
                of_path, log_sum_of_path = _attend(
                    heads.fold(queries),
                    _path(key, run),
                    _path(value, run),
                    scale=scaling,
                )
                of_path = heads.unfold(of_path)
                log_sum_of_path = heads.unfold(log_sum_of_path[..., None])[..., 0]
                of_run, own_log_sum = result, log_sum
                log_sum = torch.logaddexp(own_log_sum, log_sum_of_path)
                result = of_run * (own_log_sum - log_sum).exp()[..., None]
                result += of_path * (log_sum_of_path - log_sum).exp()[..., None]
            output[:, own] = result.transpose(1, 2)
            log_sums[:, :, own] = log_sum
        ctx.save_for_backward(query, key, value, output, log_sums)
        ctx.runs, ctx.scaling = runs, scaling
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, log_sums = ctx.saved_tensors
        heads = _Heads(query.shape[1] // key.shape[1])
        of_query = torch.empty_like(query)
        of_key, of_value = torch.zeros_like(key), torch.zeros_like(value)
        # Each part's softmax follows from the combined log-sums and the combined result.
        for run in ctx.runs:
            own = slice(run.start, run.stop)
            of_result, result = gradient[:, own].transpose(1, 2), output[:, own].transpose(1, 2)
            queries, log_sum = query[:, :, own], log_sums[:, :, own].contiguous()
            of_own = _attend_backward(
                of_result,
                queries,
                heads.repeat(key[:, :, own]),
                heads.repeat(value[:, :, own]),
                result,
                log_sum,
                0.0,
                True,
                scale=ctx.scaling,
            )
            of_query[:, :, own] = of_own[0]
            of_key[:, :, own] += heads.sum(of_own[1])
            of_value[:, :, own] += heads.sum(of_own[2])
            if not run.above:
                continue
            of_path = _attend_backward(
                heads.fold(of_result),
                heads.fold(queries),
                _path(key, run),
                _path(value, run),
                heads.fold(result),
                heads.fold(log_sum[..., None])[..., 0],
                0.0,
                False,
                scale=ctx.scaling,
            )
            of_query[:, :, own] += heads.unfold(of_path[0])
            _add_to_path(of_key, run, of_path[1])
            _add_to_path(of_value, run, of_path[2])
        return of_query, of_key, of_value, None, None


class _Heads:
    """Grouped-query attention: query heads h = k · group + g share key head k."""

    def __init__(self, group: int) -> None:
        self.group = group

    def repeat(self, of_keys: torch.Tensor) -> torch.Tensor:
        """(1, K, n, D) as (1, H, n, D)."""
        return of_keys.repeat_interleave(self.group, dim=1) if self.group > 1 else of_keys

    def sum(self, of_heads: torch.Tensor) -> torch.Tensor:
        """(1, H, n, D) as (1, K, n, D)."""
        if self.group == 1:
            return of_heads
        _, n_heads, n, width = of_heads.shape
        return of_heads.reshape(1, n_heads // self.group, self.group, n, width).sum(dim=2)

    def fold(self, of_heads: torch.Tensor) -> torch.Tensor:
        """(1, H, n, D) as (1, K, group · n, D): heads as further queries, if there is no mask."""
        _, n_heads, n, width = of_heads.shape
        return of_heads.reshape(1, n_heads // self.group, self.group * n, width)

    def unfold(self, folded: torch.Tensor) -> torch.Tensor:
        _, n_keys, n, width = folded.shape
        return folded.reshape(1, n_keys * self.group, n // self.group, width)


def _path(values: torch.Tensor, run: Run) -> torch.Tensor:
    return torch.cat([values[:, :, first:behind] for first, behind in run.above], dim=2)


def _add_to_path(values: torch.Tensor, run: Run, path: torch.Tensor) -> None:
    depth = 0
    for first, behind in run.above:
        length = behind - first
        values[:, :, first:behind] += path[:, :, depth : depth + length]
        depth += length
