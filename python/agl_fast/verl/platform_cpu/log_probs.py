"""Log-probs of packed logits without a Python loop over tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from verl.utils import torch_functional

# Logits that are converted at a time: 256 MiB of float32.
LOGITS_AT_ONCE = 2**26


def vectorize_log_probs() -> None:
    """Replace verl's loop over tokens by operations on all of them, in this process.

    Monkeypatch of `verl.utils.torch_functional.logprobs_from_logits_v2` (verl 0.9.1), which
    `logprobs_from_logits` calls where flash-attn is not installed. It calls `log_softmax` or
    `logsumexp` once for each token of a micro-batch without padding: thousands of kernels, and as
    many nodes of the graph. Obsolete with a verl whose fallback works on whole tensors.
    """
    torch_functional.logprobs_from_logits_v2 = log_probs_of_labels


def log_probs_of_labels(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """log softmax(logits)[labels].

    Beside the logits and their gradient, only `LOGITS_AT_ONCE` values exist at a time.

    Args:
        logits: (…, V) of a floating dtype.
        labels: (…) int64, from 0 to V - 1.

    Returns:
        (…) of the logits' dtype, at least float32.
    """
    flat: torch.Tensor = _LogProbs.apply(  # type: ignore[no-untyped-call]
        logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    )
    return flat.view(labels.shape)


def _chunks(logits: torch.Tensor) -> list[slice]:
    size = max(1, LOGITS_AT_ONCE // logits.shape[1])
    return [slice(start, start + size) for start in range(0, len(logits), size)]


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        precision = torch.promote_types(logits.dtype, torch.float32)
        log_sums = logits.new_empty(len(logits), dtype=precision)
        for chunk in _chunks(logits):
            log_sums[chunk] = logits[chunk].to(precision).logsumexp(dim=1)
        ctx.save_for_backward(logits, labels, log_sums)
        return logits.gather(1, labels[:, None])[:, 0].to(precision) - log_sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, labels, log_sums = ctx.saved_tensors
        of_logits = torch.empty_like(logits)
        for chunk in _chunks(logits):
            part = (logits[chunk].to(log_sums.dtype) - log_sums[chunk, None]).exp_()
            part.mul_(-gradient[chunk, None])
            part.scatter_add_(1, labels[chunk, None], gradient[chunk, None])
            of_logits[chunk] = part.to(logits.dtype)
        return of_logits, None
