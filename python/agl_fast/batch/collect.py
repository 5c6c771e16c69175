"""What the native planner counted, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agl_fast import _core
from agl_fast.batch.accounting import DROP_REASONS, Accounting, Mismatch
from agl_fast.batch.mismatch import is_retokenised

_KINDS = ("shortened", "new_conversation", "history_rewritten")


@dataclass(slots=True)
class RolloutCounts:
    accounting: Accounting
    n_rows: int
    n_chains: int
    n_cut_chains: int
    truncated: bool


def collect_accounting(counts: NDArray[np.int64]) -> list[RolloutCounts]:
    """One entry per rollout from the planner's table, (rollouts, 10 + drop reasons)."""
    collected = []
    for line in counts.tolist():
        sampled, trained, truncated, duplicate, empty_calls, empty_rows = line[:6]
        n_rows, n_chains, n_cut_chains, lost_tokens = line[6:10]
        dropped = line[10:]
        collected.append(
            RolloutCounts(
                Accounting(
                    sampled,
                    trained,
                    truncated,
                    sum(dropped),
                    duplicate,
                    dict(zip(DROP_REASONS, dropped, strict=True)),
                    empty_calls,
                    empty_rows,
                ),
                n_rows,
                n_chains,
                n_cut_chains,
                bool(lost_tokens),
            )
        )
    return collected


def collect_mismatches(
    planner: _core.Planner, rollout_ids: Iterable[str], tokenizer: Any
) -> list[Mismatch]:
    """Every mismatch with its kind; retokenised text is told apart only with a tokenizer."""
    ids = list(rollout_ids)
    collected = []
    for rollout, call, length, index, kind_code, chain, closest, context in planner.mismatches():
        kind = _KINDS[kind_code]
        if tokenizer is not None and kind != "shortened":
            before = planner.context(rollout, closest, index, context).tolist()
            prompt = planner.context(rollout, chain, index, length).tolist()
            if is_retokenised(tokenizer, before, prompt):
                kind = "retokenised"
        collected.append(Mismatch(ids[rollout], call, index, kind))
    return collected
