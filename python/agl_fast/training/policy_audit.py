"""Audit of a run: detects servers with other weights than the actor's, from log-probs."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from omegaconf import DictConfig

from agl_fast.training.audit import MIN_TOKENS, Audit, Gap
from agl_fast.training.audit_scope import Precision, Scope, scope_of

logger = logging.getLogger(__name__)

# Allowed growth of a gap over that of the first step.
HEALTHY_GROWTH, BROKEN_GROWTH = 3.0, 4.0
# Growth of the error of logits that rounding cannot explain, even if probabilities are nearly
# equal, as those of a random model, whose differences are always small.
SUDDEN_GROWTH = 50.0
# Consecutive verdicts that end a run which does not compute in float32.
BROKEN_VERDICTS = 2


class PolicyMismatchError(RuntimeError):
    """The servers sample with other weights than the actor's."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Limit of a gap.

    A gap exceeds it if the mean difference is larger or the correlation smaller, and the error of
    logits is larger, too; or if the error of logits alone is far larger.

    Attributes:
        difference: mean |p - q|.
        correlation: of p and q.
        of_logits: `Gap.of_logits`. Unlike the first two, it distinguishes rounding from other
            weights if probabilities are near 0 or 1, or nearly equal.
        of_logits_alone: limit of `Gap.of_logits` that applies without the first two.
    """

    difference: float
    correlation: float
    of_logits: float
    of_logits_alone: float

    def relative_to(self, first: Gap | None, growth: float, ceiling: Limit, floor: float) -> Limit:
        """The limit widened to `growth` times the first step's gap, at most to the ceiling.

        An error of logits alone also exceeds it at `SUDDEN_GROWTH` times the first step's, but not
        below `floor`.
        """
        if first is None:
            return self
        sudden = min(self.of_logits_alone, max(floor, SUDDEN_GROWTH * first.of_logits))
        uncorrelated = 0.0 if first.correlation != first.correlation else 1 - first.correlation
        return Limit(
            min(max(self.difference, growth * first.mean), ceiling.difference),
            max(min(self.correlation, 1 - growth * uncorrelated), ceiling.correlation),
            min(max(self.of_logits, growth * first.of_logits), ceiling.of_logits),
            max(sudden, growth * first.of_logits),
        )

    def is_exceeded_by(self, gap: Gap) -> bool:
        """Whether the gap is too wide. A NaN correlation is not compared."""
        is_wide = gap.mean > self.difference or gap.correlation < self.correlation
        return gap.of_logits > self.of_logits_alone or (is_wide and gap.of_logits > self.of_logits)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one precision.

    Attributes:
        healthy: rounding stays below; exceeding it is a warning.
        broken: rounding cannot explain a gap beyond it.
    """

    healthy: Limit
    broken: Limit


# Float32 sides agree to about 1e-6. Published pairs of bfloat16 trainers and servers have a mean
# difference of 0.004 and a correlation of 0.998; with 8 bits, or other experts selected, several
# times as much.
_EXACT = Limit(1e-3, 0.99, 0.0, 0.02)
LIMITS: Mapping[Precision, Limits] = {
    "float32": Limits(_EXACT, _EXACT),
    "16-bit": Limits(Limit(0.01, 0.99, 0.12, 0.5), Limit(0.04, 0.95, 0.3, 1.5)),
    "quantised": Limits(Limit(0.03, 0.96, 0.25, 1.0), Limit(0.06, 0.9, 0.35, 1.5)),
}
# Applies whatever the first step's gap is.
CEILING = Limit(0.075, 0.85, 0.4, math.inf)
# With top_k, where the first step includes the effect of truncation.
NO_CEILING = Limit(math.inf, -1.0, math.inf, math.inf)


class PolicyAudit:
    """Judge the steps of a run in order.

    Steps with few tokens are accumulated until there are `MIN_TOKENS`. The first verdict compares
    equal weights, so its gap is due to precision; it is the baseline of later verdicts. A resumed
    run starts with a new audit.

    Args:
        scope: what can be compared.

    Attributes:
        last: the gap of the last verdict; None before the first one.
        first: the baseline.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.first: Gap | None = None
        self.last: Gap | None = None
        self._collected = Gap()
        self._bent = Gap()
        self._reported_bent: set[tuple[str, ...]] = set()
        self._n_broken = 0

    @classmethod
    def of(cls, config: DictConfig) -> PolicyAudit:
        """The audit of a run's configuration; logs what cannot be compared."""
        scope = scope_of(config)
        if str(scope):
            logger.info("%s", scope)
        return cls(scope)

    def judge(self, step: Audit) -> None:
        """Judge a step.

        Raises:
            PolicyMismatchError: the servers do not hold the actor's weights (in float32 after one
                verdict, else after two consecutive ones), or the actor's log-probs are not finite.
        """
        if not step.is_finite:
            raise PolicyMismatchError(
                f"the actor's log-probs of {step.everything.n_tokens} trained tokens are not all "
                "finite"
            )
        self._judge_bent(step)
        self._collected += step.gap
        if self._collected.n_tokens < MIN_TOKENS or self.scope.incomparable is not None:
            return
        gap, self._collected = self._collected, Gap()
        self.last = gap
        if self.scope.is_relative and self.first is None:
            self.first = gap
            return
        limits = LIMITS["quantised" if self.scope.is_relative else self.scope.precision]
        ceiling = NO_CEILING if self.scope.is_relative else CEILING
        is_exact = limits.healthy == limits.broken
        first = None if is_exact else self.first
        broken = limits.broken.relative_to(first, BROKEN_GROWTH, ceiling, limits.healthy.of_logits)
        if broken.is_exceeded_by(gap):
            self._n_broken += 1
            message = self._message(gap, broken)
            if self.scope.stops and (is_exact or self._n_broken >= BROKEN_VERDICTS):
                raise PolicyMismatchError(message)
            logger.warning("%s", message)
            return
        self._n_broken = 0
        if self.first is None:
            self.first = gap
            return
        healthy = limits.healthy.relative_to(
            first, HEALTHY_GROWTH, ceiling, limits.healthy.of_logits
        )
        if healthy.is_exceeded_by(gap):
            logger.warning("%s", self._message(gap, healthy))

    def _judge_bent(self, step: Audit) -> None:
        if not step.bent.n_tokens:
            return
        self._bent += step.bent
        limit = LIMITS[self.scope.precision].healthy
        if self._bent.n_tokens < MIN_TOKENS:
            return
        gap, self._bent = self._bent, Gap()
        if limit.is_exceeded_by(gap) and step.bent_by not in self._reported_bent:
            self._reported_bent.add(step.bent_by)
            logger.warning(
                "Agents set %s: in %d trained tokens of such calls, probabilities of servers and "
                "actor differ by %s. The servers' distribution is then not the actor's, so that "
                "the loss's ratio is off. These calls are audited apart (training/audit/bent/*) "
                "and never end the run.",
                ", ".join(step.bent_by),
                gap.n_tokens,
                _apart(gap),
            )

    def _message(self, gap: Gap, limit: Limit) -> str:
        first = "" if self.first is None else f" ({_apart(self.first)} in the first step)"
        consequence = (
            ""
            if self.scope.stops
            else ". agentlightning.audit=warn: the run goes on, and learns from a wrong ratio"
        )
        return (
            f"in {gap.n_tokens} trained tokens, probabilities of servers and actor differ by "
            f"{_apart(gap)}; expected at most {limit.difference:.2g} and at least "
            f"{limit.correlation:.3g} with {self.scope.precision} servers or actor{first}: the "
            f"servers do not hold the actor's weights{consequence}"
        )

    def __str__(self) -> str:
        """A sentence about the last verdict."""
        if self.scope.incomparable is not None:
            return str(self.scope)
        if self.last is None:
            return f"no step had {MIN_TOKENS} trained tokens with log-probs to compare"
        return f"probabilities of servers and actor differ by {_apart(self.last)} in the last step"


def _apart(gap: Gap) -> str:
    correlation = gap.correlation
    correlated = f" and correlate by {correlation:.4f}" if correlation == correlation else ""
    return f"{gap.mean:.2g} on average{correlated}"
