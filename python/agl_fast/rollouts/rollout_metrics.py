"""Metrics of the rollouts of a training step: run, failures, concurrency."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agl_fast.proxy import Recorder
from agl_fast.rollouts.finished import FinishedRollout
from agl_fast.rows.row_metrics import finish_reason_shares

# Why complete groups of asynchronous collection are not trained.
SET_ASIDE = ("no_reward_variance", "stale")
# Always logged, so that their curves begin at 0.
_COUNTED = (
    "skipped_rollouts",
    "skipped_tokens",
    *(
        f"skipped_{what}/{reason}"
        for what in ("rollouts", "tokens")
        for reason in ("failed", "no_trainable_call", "rollout_hook", *SET_ASIDE)
    ),
    "stale_rollouts",
    "unknown_rollouts",
    "foreign_rollouts",
)


# Sampled tokens outside the batch, by cause (docs/rows.md).
LOST_TOKENS = (
    "refused_tokens",
    "client_gone_tokens",
    "aborted_tokens",
    "repeated_tokens",
    "incomplete_tokens",
    "duplicate_tokens",
    "discarded_tokens",
    "late_tokens",
    "forgotten_tokens",
)
# Of training requests alone.
_OF_TRAINING = (*LOST_TOKENS, "unseen_answers")


class ProxyCounts:
    """The proxy's counts of each training step.

    A step includes everything since the one before, except the counts of validation rollouts. What
    belongs to no rollout is included unless it was counted while a validation ran alone.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._is_train = True
        self._step: object = None
        self._counts: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()  # for the next step

    def begin(self, *, is_train: bool) -> None:
        """Begin a batch of samples.

        Args:
            is_train: training rollouts run from now on, be it beside a validation.
        """
        self._collect()
        self._is_train = is_train

    def of_step(self, step: object) -> dict[str, int]:
        """Counts of a training step so far; those that come later count in the next step."""
        self._collect()
        if step is not self._step:
            self._step, self._counts = step, Counter()
        self._counts.update(self._waiting)
        self._waiting.clear()
        counts = {name: count for name, count in self._counts.items() if count}
        return {**dict.fromkeys(_OF_TRAINING, 0), **counts}

    def _collect(self) -> None:
        counts = self._recorder.reset_counts_by_phase()
        self._waiting.update(counts.get("train", {}))
        if self._is_train:
            self._waiting.update(counts.get(None, {}))


def run_metrics(
    rollouts: Sequence[FinishedRollout],
    counts: Mapping[str, int],
    proxy_counts: Mapping[str, int],
    wall_seconds: float,
    recording_counts: Mapping[str, int],
) -> dict[str, float]:
    """Metrics ``training/*`` that do not come from the batch.

    Args:
        rollouts: all finished rollouts, including skipped ones.
        counts: of the daemon, logged as ``training/{name}``.
        proxy_counts: of the proxy's recorder, logged as ``training/proxy/{name}``.
        wall_seconds: since enqueueing.
        recording_counts: of the run's recording, logged as ``training/recording/{name}``.
    """
    failed = Counter(each.status for each in rollouts if each.failed)
    metrics: dict[str, float] = {
        "training/failed_rollouts": failed.total(),
        "training/rollouts_without_calls": sum(not each.calls for each in rollouts),
        "training/n_recorded_calls": sum(len(each.calls) for each in rollouts),
        "training/discarded_attempts": sum(each.discarded_attempts for each in rollouts),
        "training/rollout_seconds/wall": wall_seconds,
    }
    metrics |= {f"training/failed_rollouts/{status}": n for status, n in failed.items()}
    metrics |= {f"training/{name}": counts.get(name, 0) for name in _COUNTED}
    metrics |= {f"training/proxy/{name}": count for name, count in proxy_counts.items()}
    metrics |= {f"training/recording/{name}": count for name, count in recording_counts.items()}
    metrics |= finish_reason_shares(
        [call.finish_reason for each in rollouts for call in each.calls]
    )
    for name, seconds in (
        ("queued", [each.queue_seconds for each in rollouts if each.queue_seconds is not None]),
        ("run", [each.seconds for each in rollouts if each.seconds is not None]),
    ):
        if seconds:
            metrics[f"training/rollout_seconds/{name}_mean"] = float(np.mean(seconds))
            metrics[f"training/rollout_seconds/{name}_max"] = float(np.max(seconds))
    return metrics


_STATUSES = {
    "timeout": "took longer than agentlightning.llm_timeout_seconds",
    "deadline": "took longer than agentlightning.rollout_deadline_seconds",
    "unresponsive": "had a runner without heartbeats",
    "cancelled": "were cancelled",
    "failed": "failed without a known exception",
}


class Failures:
    """Count failed rollouts, and rollouts without a recorded call.

    Attributes:
        rollouts, failed: numbers over all training steps.
    """

    def __init__(self) -> None:
        self.rollouts = 0
        self.failed = 0
        self._reasons: Counter[str] = Counter()
        self._example: dict[str, str] = {}

    def add(self, rollouts: Sequence[FinishedRollout]) -> str | None:
        """Count a step's rollouts.

        Returns:
            A sentence if some failed or made no call.
        """
        of_step = Failures()
        of_step._count(rollouts)
        self._count(rollouts)
        sentences = [each for each in (of_step.sentence(), _without_calls(rollouts)) if each]
        return "; ".join(sentences) or None

    def sentence(self) -> str | None:
        """The number of failures and the most common reason; None without failures."""
        if not self.failed:
            return None
        reason, n = self._reasons.most_common(1)[0]
        of_them = "all" if n == self.failed else f"{n}"
        verb = "with " if reason not in _STATUSES.values() else ""
        return (
            f"{self.failed:,} of {self.rollouts:,} rollouts failed, {of_them} of them "
            f"{verb}{self._example.get(reason, reason)}"
        ).replace("all of them", "all")

    def _count(self, rollouts: Sequence[FinishedRollout]) -> None:
        for rollout in rollouts:
            self.rollouts += 1
            if not rollout.failed:
                continue
            self.failed += 1
            if rollout.error is None:
                reason = _STATUSES.get(rollout.status, f"ended with status {rollout.status!r}")
            else:
                # Messages contain ids; group by exception type and HTTP status.
                reason = rollout.error.partition(":")[0]
                self._example.setdefault(reason, rollout.error)
            self._reasons[reason] += 1


def _without_calls(rollouts: Sequence[FinishedRollout]) -> str | None:
    """Rollouts that succeeded without a recorded call."""
    silent = [each.rollout_id for each in rollouts if not each.failed and not each.calls]
    if not silent:
        return None
    return (
        f"{len(silent):,} succeeded without a recorded call (the first is {silent[0]!r}): did the "
        "agent call another address than the resource main_llm's?"
    )


# Calls in flight that fill a vLLM server's batch well enough. `python -m
# benchmarks.server_concurrency URL` measures it for a server.
CALLS_PER_SERVER = 16


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Concurrency of one step.

    Attributes:
        n_rollouts: rollouts that ran.
        n_servers: vLLM servers, at least 1.
        rollouts_in_flight: maximum number of rollouts running at the same time.
        call_share: fraction of a rollout's duration with a call in flight, in [0, 1]; NaN if all
            durations are 0.
        has_waited: on average, rollouts waited longer for a runner than they ran.
    """

    n_rollouts: int
    n_servers: int
    rollouts_in_flight: int
    call_share: float
    has_waited: bool

    @property
    def calls_per_server(self) -> float:
        """Calls in flight per server while all runners are busy."""
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
        """Advice if too few rollouts in flight starve the servers; else None."""
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


def concurrency(rollouts: Sequence[FinishedRollout], n_servers: int) -> Concurrency:
    """Measure the concurrency of a step's rollouts, all enqueued at about the same time."""
    ran = [each for each in rollouts if each.seconds is not None]
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


def _most_at_once(rollouts: Sequence[FinishedRollout]) -> int:
    changes = []
    for each in rollouts:
        begin = each.queue_seconds or 0.0
        changes += [(begin, 1), (begin + (each.seconds or 0.0), -1)]
    most = now = 0
    for _, change in sorted(changes):  # ends come before begins of the same moment
        now += change
        most = max(most, now)
    return most
