"""Numbers about how the rollouts of a training step went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from agl_fast.proxy import Recorder
from agl_fast.rollouts.finished import Outcome
from agl_fast.rows.row_metrics import finish_reason_shares

# Always there, so that their curves begin at 0.
_COUNTED = (
    "skipped_rollouts",
    "skipped_tokens",
    *(
        f"skipped_{what}/{reason}"
        for what in ("rollouts", "tokens")
        for reason in ("failed", "no_trainable_call", "rollout_hook")
    ),
    "stale_rollouts",
    "unknown_rollouts",
    "foreign_rollouts",
)


# Sampled tokens that the proxy kept from the batch, by what became of them (docs/rows.md).
LOST_TOKENS = (
    "refused_tokens",
    "client_gone_tokens",
    "incomplete_tokens",
    "duplicate_tokens",
    "discarded_tokens",
    "late_tokens",
    "forgotten_tokens",
)


class ProxyCounts:
    """What the proxy counted for each training step.

    A step has everything since the one before, without the counts of a validation in between. The
    lost tokens are of training calls alone, so that a training call which comes to nothing during a
    validation counts in the next step.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._is_train = True
        self._counts: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()  # for the next step

    def begin(self, *, is_train: bool) -> None:
        """A batch of samples begins."""
        self._waiting.update(
            {
                name: count
                for name, count in self._recorder.reset_counts().items()
                if self._is_train or name in LOST_TOKENS
            }
        )
        self._is_train = is_train
        if is_train:
            self._counts, self._waiting = self._waiting, Counter()

    def so_far(self) -> dict[str, int]:
        """Of the training step at hand."""
        self._counts.update(self._recorder.reset_counts())
        return {**dict.fromkeys(LOST_TOKENS, 0), **self._counts}


def run_metrics(
    outcomes: Sequence[Outcome],
    counts: Mapping[str, int],
    proxy_counts: Mapping[str, int],
    wall_seconds: float,
    recording_counts: Mapping[str, int],
) -> dict[str, float]:
    """``training/*`` numbers that a batch does not know.

    Args:
        outcomes: every rollout, also those that are skipped.
        counts: of the daemon, named in ``training/{name}``.
        proxy_counts: of the recorder, named in ``training/proxy/{name}``.
        wall_seconds: from enqueueing until now.
        recording_counts: of the run's recorder, named in ``training/recording/{name}``.
    """
    failed = Counter(each.status for each in outcomes if each.failed)
    metrics: dict[str, float] = {
        "training/failed_rollouts": failed.total(),
        "training/rollouts_without_calls": sum(not each.calls for each in outcomes),
        "training/n_recorded_calls": sum(len(each.calls) for each in outcomes),
        "training/discarded_attempts": sum(each.discarded_attempts for each in outcomes),
        "training/rollout_seconds/wall": wall_seconds,
    }
    metrics |= {f"training/failed_rollouts/{status}": n for status, n in failed.items()}
    metrics |= {f"training/{name}": counts.get(name, 0) for name in _COUNTED}
    metrics |= {f"training/proxy/{name}": count for name, count in proxy_counts.items()}
    metrics |= {f"training/recording/{name}": count for name, count in recording_counts.items()}
    metrics |= finish_reason_shares(
        [call.finish_reason for each in outcomes for call in each.calls]
    )
    for name, seconds in (
        ("queued", [each.queue_seconds for each in outcomes if each.queue_seconds is not None]),
        ("run", [each.seconds for each in outcomes if each.seconds is not None]),
    ):
        if seconds:
            metrics[f"training/rollout_seconds/{name}_mean"] = float(np.mean(seconds))
            metrics[f"training/rollout_seconds/{name}_max"] = float(np.max(seconds))
    return metrics
