"""Do the rollout servers hold the actor's weights? Every step's log-probs say."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)

# A float32 server and a float32 actor agree to about 1e-6; other weights are far beyond these.
MAX_MEAN_DIFFERENCE = 1e-3
MIN_CORRELATION = 0.99
# Fewer tokens, or probabilities that are all alike, correlate by chance.
MIN_TOKENS = 200
MIN_SPREAD = 0.02


class PolicyMismatchError(RuntimeError):
    """The servers sample with other weights than the actor's."""


@dataclass(frozen=True, slots=True)
class Audit:
    """How a step's rollout log-probs differ from the actor's, on its trained tokens.

    Attributes:
        n_tokens: trained tokens that have a rollout log-prob.
        mean_difference: of their probabilities; NaN without any.
        correlation: of their probabilities; NaN where `MIN_TOKENS` or `MIN_SPREAD` do not allow it.
        metrics: `training/audit/*`: percentiles of |Δ log-prob|, of all tokens, of the first ones
            after an observation (there a wrong context shows), and of the rest.
    """

    n_tokens: int
    mean_difference: float
    correlation: float
    metrics: dict[str, float]

    def require_same_policy(self, *, exact: bool) -> None:
        """Stop the run where the weights have parted.

        Args:
            exact: both sides compute in float32 and sample as the trainer assumes; otherwise only
                warn, as lower precision alone moves probabilities.

        Raises:
            PolicyMismatchError: `exact`, and they differ by more than float32 explains; or the
                actor's are not numbers.
        """
        if self.n_tokens and not math.isfinite(self.mean_difference):
            raise PolicyMismatchError(
                f"the actor's log-probs of {self.n_tokens} trained tokens are not all finite"
            )
        if self.n_tokens < MIN_TOKENS:
            return
        if not (self.mean_difference > MAX_MEAN_DIFFERENCE or self.correlation < MIN_CORRELATION):
            return
        message = (
            f"rollout and actor probabilities of {self.n_tokens} trained tokens differ by "
            f"{self.mean_difference:.2g} on average and correlate by {self.correlation:.4f}; "
            f"expected at most {MAX_MEAN_DIFFERENCE:g} and at least {MIN_CORRELATION}"
        )
        if exact:
            raise PolicyMismatchError(
                f"{message}: the servers do not hold the actor's weights. Or agents bend what is "
                "sampled (a forced tool_choice, a response_format, penalties: "
                "training/proxy/sampling_unenforced counts them), which with "
                "agentlightning.sampling=allow is a warning only"
            )
        logger.warning("%s.", message)


def audit(
    rollout_log_probs: torch.Tensor | None,
    actor_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    has_rollout_log_probs: torch.Tensor,
) -> Audit:
    """Compare the log-probs of the trained tokens.

    Args:
        rollout_log_probs, actor_log_probs: (B, R) float32.
        response_mask: (B, R) 1 on trained tokens.
        has_rollout_log_probs: (B,) bool; other rows are left out.
    """
    if rollout_log_probs is None:
        return Audit(0, float("nan"), float("nan"), {"training/audit/n_tokens": 0})
    trained = response_mask.bool()
    compared = trained & has_rollout_log_probs[:, None]
    untrained_before = torch.ones_like(trained)
    untrained_before[:, 1:] = ~trained[:, :-1]
    after_observation = compared & untrained_before
    after_observation[:, 0] = False  # that one follows the prompt

    difference = (rollout_log_probs - actor_log_probs).abs()
    rollout = rollout_log_probs[compared].double().exp()
    actor = actor_log_probs[compared].double().exp()
    n_tokens = rollout.numel()
    mean_difference = float((rollout - actor).abs().mean()) if n_tokens else float("nan")
    correlation = _correlation(rollout, actor)
    metrics: dict[str, float] = {"training/audit/n_tokens": n_tokens}
    if n_tokens:
        metrics["training/audit/prob_diff_mean"] = mean_difference
        metrics["training/audit/prob_diff_max"] = float((rollout - actor).abs().max())
    if correlation == correlation:
        metrics["training/audit/prob_correlation"] = correlation
    for name, tokens in (
        ("all", compared),
        ("after_observation", after_observation),
        ("rest", compared & ~after_observation),
    ):
        metrics |= _percentiles(f"training/audit/logprob_diff/{name}", difference[tokens])
    return Audit(n_tokens, mean_difference, correlation, metrics)


def computes_exactly(config: Any) -> bool:
    """Whether rollout and actor compute in float32 and sample what the trainer assumes.

    The actor knows of the temperature only; the servers' log-probs are of what is left by top_p and
    top_k.
    """
    parts = config.actor_rollout_ref
    rollout = parts.rollout
    is_same_distribution = (
        rollout.get("top_p", 1.0) == 1.0
        and rollout.get("top_k", -1) <= 0
        and (
            rollout.get("logprobs_mode", "processed_logprobs") == "processed_logprobs"
            or rollout.temperature == 1.0
        )
    )
    precision = parts.actor.fsdp_config.get("mixed_precision") or {}
    return bool(
        is_same_distribution
        and str(rollout.dtype) in ("float32", "float", "fp32")
        and str(precision.get("param_dtype", "bf16")) in ("float32", "float", "fp32")
        and config.get("agentlightning", {}).get("sampling", "enforce") == "enforce"
    )


def _correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    if first.numel() < MIN_TOKENS or min(first.std(), second.std()) < MIN_SPREAD:
        return float("nan")
    return float(torch.corrcoef(torch.stack([first, second]))[0, 1])


def _percentiles(name: str, differences: torch.Tensor) -> dict[str, float]:
    if not differences.numel():
        return {}
    ordered = differences.double().sort().values
    # torch.quantile refuses more than 16 million numbers.
    return {
        f"{name}/p{percent}": float(ordered[round(percent / 100 * (len(ordered) - 1))])
        for percent in (50, 99)
    }
