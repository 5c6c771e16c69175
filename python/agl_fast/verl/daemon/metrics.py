"""Numbers about how the rollouts of a training step went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from agl_fast.verl.daemon.outcomes import Outcome

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
)


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
        "training/discarded_attempts": sum(each.discarded_attempts for each in outcomes),
        "training/rollout_seconds/wall": wall_seconds,
    }
    metrics |= {f"training/failed_rollouts/{status}": n for status, n in failed.items()}
    metrics |= {f"training/{name}": counts.get(name, 0) for name in _COUNTED}
    metrics |= {f"training/proxy/{name}": count for name, count in proxy_counts.items()}
    metrics |= {f"training/recording/{name}": count for name, count in recording_counts.items()}
    for name, seconds in (
        ("queued", [each.queue_seconds for each in outcomes if each.queue_seconds is not None]),
        ("run", [each.seconds for each in outcomes if each.seconds is not None]),
    ):
        if seconds:
            metrics[f"training/rollout_seconds/{name}_mean"] = float(np.mean(seconds))
            metrics[f"training/rollout_seconds/{name}_max"] = float(np.max(seconds))
    return metrics
