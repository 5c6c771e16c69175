"""Log-prob, entropy and Σ p² of single tokens, without materialising all logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

# Number of logits in memory at a time: 256 MiB of float32.
LOGITS_AT_ONCE = 2**26
LOG_PROB, ENTROPY, SUM_PI_SQUARED = range(3)


@dataclass(frozen=True)
class ScoreRequest:
    """N tokens to score; the head gets the hidden states of their parents.

    Attributes:
        tokens: (N,) int64.
        temperatures: (N,) float32; None: 1.
        entropy, sum_pi_squared: compute these; otherwise they are 0.
    """

    tokens: torch.Tensor
    temperatures: torch.Tensor | None
    entropy: bool
    sum_pi_squared: bool


class TokenScores:
    """Replacement of a language head's `forward`, called by the model while FSDP has gathered the
    head's parameters.

    Without a request it returns logits. With one, it maps (1, N, hidden) states to (1, N, 3) scores
    of at least float32: the token's log-prob, and entropy and Σ p² of the softmax of logits over
    temperature. If N tokens have more than `LOGITS_AT_ONCE` logits, it computes them in chunks, and
    again in the backward pass. Σ p² has no gradient.

    Args:
        head: the language head.
        n_vocabulary: number of logits per token.

    Attributes:
        request: for the next call only.
    """

    def __init__(self, head: torch.nn.Module, n_vocabulary: int) -> None:
        self._logits: Callable[[torch.Tensor], torch.Tensor] = head.forward
        self._n_vocabulary = n_vocabulary
        self.request: ScoreRequest | None = None
        head.forward = self

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        request, self.request = self.request, None
        if request is None:
            return self._logits(hidden)
        n_tokens = hidden.shape[1]
        size = max(1, LOGITS_AT_ONCE // self._n_vocabulary)
        if n_tokens <= size:
            return self._scores(hidden[0], request, slice(None))[None]
        chunks = [
            checkpoint(
                self._scores, hidden[0], request, slice(start, start + size), use_reentrant=False
            )
            for start in range(0, n_tokens, size)
        ]
        return torch.cat(chunks)[None]

    def _scores(self, hidden: torch.Tensor, request: ScoreRequest, chunk: slice) -> torch.Tensor:
        temperatures = None if request.temperatures is None else request.temperatures[chunk]
        logits, tokens = self._logits(hidden[chunk]), request.tokens[chunk]
        scores: torch.Tensor = _Scores.apply(  # type: ignore[no-untyped-call]
            logits, tokens, temperatures, request
        )
        return scores


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        temperatures: torch.Tensor | None,
        request: ScoreRequest,
    ) -> torch.Tensor:
        ctx.dtype = logits.dtype
        scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if temperatures is not None:
            scaled = scaled / temperatures[:, None].to(scaled.dtype)
        log_sums = scaled.logsumexp(dim=1)
        scores = scaled.new_zeros(len(tokens), 3)
        scores[:, LOG_PROB] = scaled.gather(1, tokens[:, None])[:, 0] - log_sums
        if request.entropy or request.sum_pi_squared:
            probabilities = (scaled - log_sums[:, None]).exp_()
            if request.sum_pi_squared:
                scores[:, SUM_PI_SQUARED] = probabilities.square().sum(dim=1)
            if request.entropy:
                scores[:, ENTROPY] = log_sums - probabilities.mul_(scaled).sum(dim=1)
        ctx.save_for_backward(scaled, log_sums, tokens, temperatures, scores[:, ENTROPY])
        ctx.has_entropy = request.entropy
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scaled, log_sums, tokens, temperatures, entropy = ctx.saved_tensors
        of_log_prob, of_entropy = gradient[:, LOG_PROB, None], gradient[:, ENTROPY, None]
        log_probabilities = scaled - log_sums[:, None]
        if ctx.has_entropy:
            of_logits = log_probabilities.exp()
            log_probabilities.add_(entropy[:, None]).mul_(of_entropy).add_(of_log_prob).neg_()
            of_logits.mul_(log_probabilities)
        else:
            of_logits = log_probabilities.exp_().mul_(-of_log_prob)
        of_logits.scatter_add_(1, tokens[:, None], of_log_prob)
        if temperatures is not None:
            of_logits /= temperatures[:, None].to(of_logits.dtype)
        return of_logits.to(ctx.dtype), None, None, None
