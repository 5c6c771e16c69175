"""Do the rollout servers hold the actor's weights? The steps' log-probs answer."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agl_fast.training.audit import MIN_TOKENS, Audit, Gap
from agl_fast.training.audit_scope import Precision, Scope, scope_of

logger = logging.getLogger(__name__)

# A gap may grow so many times over that of the first step.
HEALTHY_GROWTH, BROKEN_GROWTH = 3.0, 4.0
# An error of logits that grows so many times over the first step's is not rounding, even where
# probabilities are all alike, as a random model's: their differences are small, whatever happens.
SUDDEN_GROWTH = 50.0
# So many verdicts in a row end a run that does not compute in float32.
BROKEN_VERDICTS = 2


class PolicyMismatchError(RuntimeError):
    """The servers sample with other weights than the actor's."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A gap is too wide with a larger mean difference or a smaller correlation of probabilities
    together with a larger error of logits, or with a far larger error of logits alone.

    Attributes:
        difference: mean |p - q|.
        correlation: of p and q.
        of_logits: `Gap.of_logits`. Where probabilities are near 0 or 1, or all alike, it tells
            rounding from other weights, which the first two do not.
        of_logits_alone: likewise, whatever the first two are.
    """

    difference: float
    correlation: float
    of_logits: float
    of_logits_alone: float

    def relative_to(self, first: Gap | None, growth: float, ceiling: Limit, floor: float) -> Limit:
        """At least `growth` times the first step's gap, and never beyond the ceiling.

        An error of logits alone is too large, too, at `SUDDEN_GROWTH` times the first step's, from
        `floor` on.
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
        """A correlation that is NaN exceeds nothing."""
        is_wide = gap.mean > self.difference or gap.correlation < self.correlation
        return gap.of_logits > self.of_logits_alone or (is_wide and gap.of_logits > self.of_logits)


@dataclass(frozen=True, slots=True)
class Limits:
    """
    Attributes:
        healthy: rounding explains less than this; more is a warning.
        broken: rounding does not explain more than this.
    """

    healthy: Limit
    broken: Limit


# Float32 sides agree to about 1e-6. Public pairs of bfloat16 trainers and servers differ by 0.004
# on average and correlate by 0.998; with 8 bits, or other experts chosen, by several times as much.
_EXACT = Limit(1e-3, 0.99, 0.0, 0.02)
LIMITS: Mapping[Precision, Limits] = {
    "float32": Limits(_EXACT, _EXACT),
    "16-bit": Limits(Limit(0.01, 0.99, 0.12, 0.5), Limit(0.04, 0.95, 0.3, 1.5)),
    "quantised": Limits(Limit(0.03, 0.96, 0.25, 1.0), Limit(0.06, 0.9, 0.35, 1.5)),
}
# However wide the first step's gap is.
CEILING = Limit(0.075, 0.85, 0.4, math.inf)
# Where the first step has what a cut by top_k makes of probabilities.
NO_CEILING = Limit(math.inf, -1.0, math.inf, math.inf)


class PolicyAudit:
    """Judges the steps of a run, one after the other.

    Steps with few tokens add up until they have `MIN_TOKENS`. The first verdict is about policies
    that should be equal: what they differ by is the precision's, and the baseline of the later
    ones. A run that resumes makes a new one.

    Args:
        scope: what is compared.

    Attributes:
        last: the gap of the last verdict; None: there was none.
        first: the baseline.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.first: Gap | None = None
        self.last: Gap | None = None
        self._collected = Gap()
        self._bent = Gap()
        self._said_bent: set[tuple[str, ...]] = set()
        self._n_broken = 0

    @classmethod
    def of(cls, config: Any) -> PolicyAudit:
        """For a run's configuration. It prints what cannot be compared."""
        scope = scope_of(config)
        if str(scope):
            print(f"agl_fast: {scope}", flush=True)
        return cls(scope)

    def judge(self, found: Audit) -> None:
        """Take a step.

        Raises:
            PolicyMismatchError: the servers do not hold the actor's weights: in float32 after one
                verdict, else after two in a row. Or the actor's log-probs are not numbers.
        """
        if not found.is_finite:
            raise PolicyMismatchError(
                f"the actor's log-probs of {found.everything.n_tokens} trained tokens are not all "
                "finite"
            )
        self._judge_bent(found)
        self._collected += found.gap
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

    def _judge_bent(self, found: Audit) -> None:
        if not found.bent.n_tokens:
            return
        self._bent += found.bent
        limit = LIMITS[self.scope.precision].healthy
        if self._bent.n_tokens < MIN_TOKENS:
            return
        gap, self._bent = self._bent, Gap()
        if limit.is_exceeded_by(gap) and found.bent_by not in self._said_bent:
            self._said_bent.add(found.bent_by)
            logger.warning(
                "Agents set %s: in %d trained tokens of such calls, probabilities of servers and "
                "actor differ by %s. The servers' distribution is then not the actor's, so that "
                "the loss's ratio is off. These calls are audited apart (training/audit/bent/*) "
                "and never end the run.",
                ", ".join(found.bent_by),
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
        """The last verdict, for the end of a run."""
        if self.scope.incomparable is not None:
            return str(self.scope)
        if self.last is None:
            return f"no step had {MIN_TOKENS} trained tokens with log-probs to compare"
        return f"probabilities of servers and actor differ by {_apart(self.last)} in the last step"


def _apart(gap: Gap) -> str:
    correlation = gap.correlation
    correlated = f" and correlate by {correlation:.4f}" if correlation == correlation else ""
    return f"{gap.mean:.2g} on average{correlated}"
