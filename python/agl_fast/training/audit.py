"""Comparison of the servers' log-probs with the actor's in one step, without a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from agl_fast.rollouts.training_rows import BENT_CALLS
from agl_fast.training.audit_scope import Scope

# With fewer tokens, or nearly equal probabilities, a correlation is noise.
MIN_TOKENS = 200
MIN_SPREAD = 0.02
# Added to 1 - p, so that rounding errors of certain tokens have no weight.
_CERTAIN = 1e-3


@dataclass(frozen=True, slots=True)
class Gap:
    """Differences between two policies' probabilities p and q of the same tokens.

    Holds sums over tokens, so that the gaps of several steps can be added.

    Attributes:
        n_tokens: number of compared tokens.
        differences, squares, largest: of |p - q|: sum, sum of squares, maximum.
        log_differences: sum of |log p - log q|.
        uncertainty: sum of 1 - (p + q) / 2.
        moments: sums of p, q, p², q² and p·q.
    """

    n_tokens: int = 0
    differences: float = 0.0
    squares: float = 0.0
    largest: float = 0.0
    log_differences: float = 0.0
    uncertainty: float = 0.0
    moments: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)

    @classmethod
    def between(cls, rollout: torch.Tensor, actor: torch.Tensor) -> Gap:
        """The gap of two tensors of log-probs, (N,) each."""
        if not rollout.numel():
            return cls()
        p, q = rollout.double().exp(), actor.double().exp()
        apart = (p - q).abs()
        return cls(
            rollout.numel(),
            float(apart.sum()),
            float(apart.square().sum()),
            float(apart.max()),
            float((rollout.double() - actor.double()).abs().sum()),
            float((1 - (p + q) / 2).sum()),
            (
                float(p.sum()),
                float(q.sum()),
                float(p.square().sum()),
                float(q.square().sum()),
                float((p * q).sum()),
            ),
        )

    def __add__(self, other: Gap) -> Gap:
        p, q, pp, qq, pq = (
            one + another for one, another in zip(self.moments, other.moments, strict=True)
        )
        return Gap(
            self.n_tokens + other.n_tokens,
            self.differences + other.differences,
            self.squares + other.squares,
            max(self.largest, other.largest),
            self.log_differences + other.log_differences,
            self.uncertainty + other.uncertainty,
            (p, q, pp, qq, pq),
        )

    @property
    def mean(self) -> float:
        """Mean of |p - q|; NaN without tokens."""
        return self.differences / self.n_tokens if self.n_tokens else math.nan

    @property
    def deviation(self) -> float:
        """Standard deviation of |p - q|; NaN with fewer than two tokens."""
        if self.n_tokens < 2:
            return math.nan
        spread = self.squares - self.differences**2 / self.n_tokens
        return math.sqrt(max(0.0, spread) / (self.n_tokens - 1))

    @property
    def pearson(self) -> float:
        """Correlation of p and q for any number of tokens; NaN if one side is constant."""
        if self.n_tokens < 2:
            return math.nan
        p, q, pp, qq, pq = (each / self.n_tokens for each in self.moments)
        variances = (pp - p * p) * (qq - q * q)
        return min(1.0, (pq - p * q) / math.sqrt(variances)) if variances > 0 else math.nan

    @property
    def correlation(self) -> float:
        """`pearson`; NaN below `MIN_TOKENS` or `MIN_SPREAD`."""
        if self.n_tokens < MIN_TOKENS:
            return math.nan
        p, q, pp, qq, _ = (each / self.n_tokens for each in self.moments)
        spread = math.sqrt(max(0.0, min(pp - p * p, qq - q * q)))
        return math.nan if spread < MIN_SPREAD else self.pearson

    @property
    def of_logits(self) -> float:
        """Estimated mean error of logits, independent of the entropy; NaN without tokens.

        An error d of a token's logit changes its log-prob by (1 - p) d.
        """
        if not self.n_tokens:
            return math.nan
        return self.log_differences / (self.uncertainty + _CERTAIN * self.n_tokens)


@dataclass(frozen=True, slots=True)
class Audit:
    """Gaps over one step's trained tokens with rollout log-probs.

    Attributes:
        gap: of the tokens that the verdict is based on.
        bent: of tokens whose calls changed the sampling distribution.
        everything: of both, with unadjusted log-probs.
        bent_by: names of the parameters that changed the distribution.
        is_finite: all of the actor's log-probs are finite.
        metrics: `training/audit/*`: percentiles of |Δ log-prob| of all tokens, of first tokens
            after context tokens (which reveal a wrong context) and of the rest; and verl's
            `training/rollout_probs_diff_*`.
    """

    gap: Gap
    bent: Gap = field(default_factory=Gap)
    everything: Gap = field(default_factory=Gap)
    bent_by: tuple[str, ...] = ()
    is_finite: bool = True
    metrics: dict[str, float] = field(default_factory=dict)


def audit(
    rollout_log_probs: torch.Tensor | None,
    actor_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    has_rollout_log_probs: torch.Tensor,
    *,
    scope: Scope,
    bent: torch.Tensor | None = None,
    bent_by: tuple[str, ...] = (),
    is_current: torch.Tensor | None = None,
) -> Audit:
    """Compare the log-probs of the trained tokens.

    Args:
        rollout_log_probs, actor_log_probs: (B, R) float32.
        response_mask: (B, R) 1 on trained tokens.
        has_rollout_log_probs: (B,) bool; rows with False are not compared.
        scope: the distribution of the servers' log-probs.
        bent: (B, R) bool, tokens of calls that changed the sampling distribution; None: no token.
        bent_by: names of the parameters that changed it.
        is_current: (B, R) bool, tokens that the actor's own policy version sampled; older ones are
            not compared. None: all tokens.
    """
    if rollout_log_probs is None:
        return Audit(Gap(), metrics={"training/audit/n_tokens": 0})
    trained = response_mask.bool()
    compared = trained & has_rollout_log_probs[:, None]
    if is_current is not None:
        compared &= is_current
    apart = compared & bent if bent is not None else torch.zeros_like(compared)
    plain = compared & ~apart
    untrained_before = torch.ones_like(trained)
    untrained_before[:, 1:] = ~trained[:, :-1]
    after_observation = plain & untrained_before
    after_observation[:, 0] = False  # follows the prompt

    expected = scope.nearest(rollout_log_probs, actor_log_probs)
    gap = Gap.between(rollout_log_probs[plain], expected[plain])
    bent_gap = Gap.between(rollout_log_probs[apart], actor_log_probs[apart])
    everything = Gap.between(rollout_log_probs[compared], actor_log_probs[compared])
    metrics = _metrics("training/audit/", gap) | verl_metrics(everything)
    if bent_gap.n_tokens:
        metrics |= _metrics("training/audit/bent/", bent_gap)
    difference = (rollout_log_probs - expected).abs()
    for name, tokens in (
        ("all", plain),
        ("after_observation", after_observation),
        ("rest", plain & ~after_observation),
    ):
        metrics |= _percentiles(f"training/audit/logprob_diff/{name}", difference[tokens])
    is_finite = bool(torch.isfinite(actor_log_probs[compared]).all())
    return Audit(gap, bent_gap, everything, bent_by, is_finite, metrics)


def verl_metrics(gap: Gap) -> dict[str, float]:
    """The gap as metrics of verl's own trainer."""
    if not gap.n_tokens:
        return {"training/rollout_probs_diff_valid": 0}
    metrics = {
        "training/rollout_probs_diff_valid": 1,
        "training/rollout_probs_diff_max": gap.largest,
        "training/rollout_probs_diff_mean": gap.mean,
        "training/rollout_probs_diff_std": gap.deviation,
        "training/rollout_actor_probs_pearson_corr": gap.pearson,
    }
    return {name: value for name, value in metrics.items() if value == value}


def bent_tokens(
    columns: Mapping[str, Any], call_index: torch.Tensor | None
) -> tuple[torch.Tensor | None, tuple[str, ...]]:
    """Tokens of calls that changed the sampling distribution, and the parameters that did it.

    Args:
        columns: with `BENT_CALLS`, the parameters' names by call index for every row.
        call_index: (B, R), -1 on tokens that no call sampled.

    Returns:
        (B, R) bool, None if there is no such call; the parameters' names, sorted.
    """
    calls_of_rows = columns.get(BENT_CALLS)
    if calls_of_rows is None or call_index is None or not any(calls_of_rows):
        return None, ()
    bent = torch.zeros_like(call_index, dtype=torch.bool)
    for row, calls in enumerate(calls_of_rows):
        if calls:
            bent[row] = torch.from_numpy(np.isin(call_index[row].numpy(), list(calls)))
    names = {name for calls in calls_of_rows for by in calls.values() for name in by}
    return bent, tuple(sorted(names))


def _metrics(prefix: str, gap: Gap) -> dict[str, float]:
    metrics: dict[str, float] = {f"{prefix}n_tokens": gap.n_tokens}
    if gap.n_tokens:
        metrics[f"{prefix}prob_diff_mean"] = gap.mean
        metrics[f"{prefix}prob_diff_max"] = gap.largest
        metrics[f"{prefix}logit_diff"] = gap.of_logits
    if gap.correlation == gap.correlation:
        metrics[f"{prefix}prob_correlation"] = gap.correlation
    return metrics


def _percentiles(name: str, differences: torch.Tensor) -> dict[str, float]:
    if not differences.numel():
        return {}
    ordered = differences.double().sort().values
    # torch.quantile refuses more than 16 million numbers.
    return {
        f"{name}/p{percent}": float(ordered[round(percent / 100 * (len(ordered) - 1))])
        for percent in (50, 99)
    }
