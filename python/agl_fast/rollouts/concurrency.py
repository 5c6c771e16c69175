"""How many rollouts and calls were in flight in a step, and whether runners limited it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agl_fast.rollouts.finished import Outcome

# Calls in flight that fill a vLLM server's batch well enough. `python -m
# benchmarks.server_concurrency URL` measures it for a server.
CALLS_PER_SERVER = 16


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Concurrency of one step.

    Attributes:
        n_rollouts: rollouts that ran.
        n_servers: vLLM servers, at least 1.
        rollouts_in_flight: the most rollouts that ran at the same time.
        call_share: share of a rollout's time in which a call of it is in flight, in [0, 1]; NaN
            where no rollout took time.
        has_waited: the mean rollout waited longer for a runner than it ran.
    """

    n_rollouts: int
    n_servers: int
    rollouts_in_flight: int
    call_share: float
    has_waited: bool

    @property
    def calls_per_server(self) -> float:
        """Calls in flight on each server while all runners are busy."""
        return self.rollouts_in_flight * self.call_share / self.n_servers

    @property
    def metrics(self) -> dict[str, float]:
        metrics = {"training/concurrency/rollouts_in_flight": float(self.rollouts_in_flight)}
        if math.isfinite(self.call_share):
            metrics["training/concurrency/call_share"] = self.call_share
            metrics["training/concurrency/calls_per_server"] = self.calls_per_server
        return metrics

    @property
    def notice(self) -> str | None:
        """What to change where too few rollouts in flight starve the servers; else None."""
        is_starved = self.calls_per_server < CALLS_PER_SERVER  # False for NaN
        if not (self.has_waited and is_starved and self.call_share > 0):
            return None
        wanted = math.ceil(CALLS_PER_SERVER * self.n_servers / self.call_share)
        wanted = min(wanted, self.n_rollouts)
        if wanted <= self.rollouts_in_flight:
            return None
        return (
            f"The runners starve the servers: at most {self.rollouts_in_flight} of "
            f"{self.n_rollouts} rollouts ran at the same time, with "
            f"{self.calls_per_server:.1f} calls in flight on each of {self.n_servers} vLLM "
            f"servers, while the others waited. Have about {wanted} rollouts in flight: "
            f"agl.Trainer(n_runners={wanted}), one rollout per process, or fewer processes with "
            "runner=agl_fast.ConcurrentRunner(rollouts_in_flight=…) for an `async def` agent."
        )


def concurrency(outcomes: Sequence[Outcome], n_servers: int) -> Concurrency:
    """Measure the concurrency of a step's rollouts, all enqueued at about the same time."""
    ran = [each for each in outcomes if each.seconds is not None]
    run_seconds = sum(each.seconds or 0.0 for each in ran)
    call_seconds = sum(each.call_seconds for each in ran)
    waited = sum(each.queue_seconds or 0.0 for each in ran)
    return Concurrency(
        n_rollouts=len(ran),
        n_servers=max(1, n_servers),
        rollouts_in_flight=_most_at_once(ran),
        call_share=min(1.0, call_seconds / run_seconds) if run_seconds > 0 else math.nan,
        has_waited=waited > run_seconds,
    )


def _most_at_once(outcomes: Sequence[Outcome]) -> int:
    changes = []
    for each in outcomes:
        begin = each.queue_seconds or 0.0
        changes += [(begin, 1), (begin + (each.seconds or 0.0), -1)]
    most = now = 0
    for _, change in sorted(changes):  # ends come before begins of the same moment
        now += change
        most = max(most, now)
    return most
