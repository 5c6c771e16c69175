"""Metrics of a batch that a training step logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agl_fast.rows.accounting import DROP_REASONS, Accounting, Mismatch, RolloutEntry
from agl_fast.rows.mismatches import AGENT_LIGHTNING_NAMES

# Finish reasons of a vLLM server. Others that occur are logged, too; "none" if missing.
FINISH_REASONS = ("stop", "length", "tool_calls", "abort")


def finish_reason_shares(reasons: Sequence[str | None]) -> dict[str, float]:
    """``training/finish_reason/{reason}``: share of the calls with that reason; the sum is 1.

    Args:
        reasons: one entry per call; empty: no metrics.
    """
    if not reasons:
        return {}
    counts = Counter("none" if reason is None else str(reason) for reason in reasons)
    return {
        f"training/finish_reason/{reason}": counts[reason] / len(reasons)
        for reason in dict.fromkeys((*FINISH_REASONS, *counts))
    }


def training_metrics(
    rollouts: Sequence[RolloutEntry],
    accounting: Accounting,
    response_lengths: NDArray[np.int64],
    n_chains: NDArray[np.int64],
    n_cut_chains: int,
    mismatches: Sequence[Mismatch] | None,
    finish_reasons: Sequence[str | None],
) -> dict[str, float]:
    """``training/*`` metrics; Agent-lightning 0.3's names keep their meaning.

    Args:
        rollouts: every rollout of the batch.
        accounting: total over the rollouts.
        response_lengths: sampled tokens per call, (calls,).
        n_chains: chains per rollout, (rollouts,).
        n_cut_chains: chains longer than their response limit.
        mismatches: broken prefixes; None if the level does not merge calls.
        finish_reasons: one entry per call.
    """
    n_rows = sum(entry.n_rows for entry in rollouts)
    n_without_reward = sum(not entry.has_reward for entry in rollouts)
    metrics: dict[str, float] = {
        "training/reward": float(np.mean([entry.reward for entry in rollouts])),
        "training/n_rollouts": len(rollouts),
        "training/n_rollouts_w_trace": sum(entry.n_calls > 0 for entry in rollouts),
        "training/n_rollouts_w_reward": len(rollouts) - n_without_reward,
        "training/n_truncated_triplets": n_cut_chains,
        "training/n_triplets": n_rows,
        "training/n_calls": len(response_lengths),
        "training/n_groups": len({entry.data_id for entry in rollouts}),
        "training/n_truncated_rollouts": sum(entry.truncated for entry in rollouts),
        "training/rows_per_rollout": n_rows / len(rollouts),
        "training/tokens/sampled": accounting.sampled,
        "training/tokens/trained": accounting.trained,
        "training/tokens/truncated": accounting.truncated,
        "training/tokens/dropped": accounting.dropped,
        "training/tokens/duplicate": accounting.duplicate,
        "training/n_empty_calls": accounting.empty_calls,
        "training/n_empty_rows": accounting.empty_rows,
        "training/response_id_clashes": accounting.response_id_clashes,
    }
    metrics |= finish_reason_shares(finish_reasons)
    for reason in DROP_REASONS:
        metrics[f"training/tokens/dropped/{reason}"] = accounting.dropped_by_reason[reason]
    if mismatches is not None and len(response_lengths):
        metrics |= _by_turn(response_lengths, n_chains)
        metrics |= _mismatch_counts(mismatches, len(response_lengths))
    return metrics


def _by_turn(response_lengths: NDArray[np.int64], n_chains: NDArray[np.int64]) -> dict[str, float]:
    return {
        "training/n_unmerged_rollouts": int((n_chains > 1).sum()),
        "training/n_triplets_by_turn": len(response_lengths),
        "training/avg_response_length_by_turn": float(response_lengths.mean()),
        "training/max_response_length_by_turn": int(response_lengths.max()),
        "training/min_response_length_by_turn": int(response_lengths.min()),
    }


def _mismatch_counts(mismatches: Sequence[Mismatch], n_calls: int) -> dict[str, float]:
    kinds = Counter(mismatch.kind for mismatch in mismatches)
    counts: dict[str, float] = {}
    for kind, name in AGENT_LIGHTNING_NAMES.items():
        counts[f"training/mismatches/{kind}"] = kinds[kind]
        key = f"training/{name}_mismatch_triplets"
        counts[key] = counts.get(key, 0) + kinds[kind]
        counts[f"training/{name}_mismatch_ratio"] = counts[key] / n_calls
    return counts
