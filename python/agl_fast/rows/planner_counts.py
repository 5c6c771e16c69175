"""What the native planner counted, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agl_fast import _core
from agl_fast.rows.accounting import DROP_REASONS, Accounting, Mismatch
from agl_fast.rows.mismatch import is_retokenised

_KINDS = ("shortened", "generation_prompt", "new_conversation", "history_rewritten")


# The planner's table, (rollouts, columns): counts by name, then dropped tokens by reason.
_COLUMNS = (
    "sampled",
    "trained",
    "truncated",
    "duplicate",
    "empty_calls",
    "empty_rows",
    "rows",
    "chains",
    "cut_chains",
    "lost_tokens",
    "response_id_clashes",
)


class Counts:
    """What the planner counted, per rollout and in all."""

    def __init__(self, table: NDArray[np.int64]) -> None:
        self._table = table
        self._lines = table.tolist()

    def column(self, name: str) -> NDArray[np.int64]:
        """One count of every rollout, (rollouts,)."""
        return self._table[:, _COLUMNS.index(name)]

    def total(self) -> Accounting:
        return _accounting(self._table.sum(axis=0).tolist())

    def of_rollout(self, index: int) -> Accounting:
        return _accounting(self._lines[index])


def _accounting(line: list[int]) -> Accounting:
    count = dict(zip(_COLUMNS, line, strict=False))
    dropped = dict(zip(DROP_REASONS, line[len(_COLUMNS) :], strict=True))
    return Accounting(
        sampled=count["sampled"],
        trained=count["trained"],
        truncated=count["truncated"],
        dropped=sum(dropped.values()),
        duplicate=count["duplicate"],
        dropped_by_reason=dropped,
        empty_calls=count["empty_calls"],
        empty_rows=count["empty_rows"],
        response_id_clashes=count["response_id_clashes"],
    )


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
