"""Failed rollouts, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from agl_fast.rollouts.finished import Outcome

_STATUSES = {
    "timeout": "took longer than agentlightning.llm_timeout_seconds",
    "deadline": "took longer than agentlightning.rollout_deadline_seconds",
    "unresponsive": "were of a runner that gave no sign of life",
    "cancelled": "were cancelled",
    "failed": "failed without a known exception",
}


class Failures:
    """Counts the rollouts of a run that failed, and those without a recorded call.

    Attributes:
        rollouts, failed: of all training steps.
    """

    def __init__(self) -> None:
        self.rollouts = 0
        self.failed = 0
        self._reasons: Counter[str] = Counter()
        self._example: dict[str, str] = {}

    def add(self, outcomes: Sequence[Outcome]) -> str | None:
        """Take a step's rollouts.

        Returns:
            A sentence where some failed or made no call.
        """
        of_step = Failures()
        of_step._count(outcomes)
        self._count(outcomes)
        told = [each for each in (of_step.sentence(), _without_calls(outcomes)) if each]
        return "; ".join(told) or None

    def sentence(self) -> str | None:
        """How many failed, and the commonest reason; None: none did."""
        if not self.failed:
            return None
        reason, n = self._reasons.most_common(1)[0]
        of_them = "all" if n == self.failed else f"{n}"
        verb = "with " if reason not in _STATUSES.values() else ""
        return (
            f"{self.failed:,} of {self.rollouts:,} rollouts failed, {of_them} of them "
            f"{verb}{self._example.get(reason, reason)}"
        ).replace("all of them", "all")

    def _count(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            self.rollouts += 1
            if not outcome.failed:
                continue
            self.failed += 1
            if outcome.error is None:
                reason = _STATUSES.get(outcome.status, f"ended with status {outcome.status!r}")
            else:
                # Messages have ids in them; the type and the HTTP status tell kinds apart.
                reason = outcome.error.partition(":")[0]
                self._example.setdefault(reason, outcome.error)
            self._reasons[reason] += 1


def _without_calls(outcomes: Sequence[Outcome]) -> str | None:
    """Rollouts that succeeded although the proxy recorded nothing of them."""
    silent = [each.rollout_id for each in outcomes if not each.failed and not each.calls]
    if not silent:
        return None
    return (
        f"{len(silent):,} succeeded without a recorded call (the first is {silent[0]!r}): did the "
        "agent call another address than the resource main_llm's?"
    )
