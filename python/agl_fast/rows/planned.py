"""Planned rollouts: what the builder keeps of them, and what the native planner counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agl_fast import _core
from agl_fast.rows.accounting import DROP_REASONS, Accounting, Mismatch, RolloutEntry
from agl_fast.rows.calls import Call, Rollout
from agl_fast.rows.mismatches import is_retokenised
from agl_fast.rows.rewards import final_reward, read_credits, read_rewards

# The planner's codes of kinds.
_KINDS = (
    "shortened",
    "generation_prompt",
    "new_conversation",
    "history_rewritten",
    "positions_changed",
)
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


@dataclass(slots=True)
class Pending:
    """A planned rollout, for its entry in the rollout table.

    Attributes:
        reward: own reward; None if missing.
        index: position in the batch.
        open: whether further calls may be added.
        call_rewards, call_credits, finish_reasons: one entry per call.
    """

    rollout_id: str
    data_id: str
    reward: float | None
    status: str | None
    index: int
    open: bool
    call_rewards: list[float | None] = field(default_factory=list)
    call_credits: list[float] = field(default_factory=list)
    finish_reasons: list[str | None] = field(default_factory=list)

    @classmethod
    def of(cls, rollout: Rollout, calls: Sequence[Call], index: int) -> Pending:
        """Read a complete rollout.

        Raises:
            TypeError, ValueError: a reward or credit is wrong; the message names it.
        """
        rollout_id = rollout.rollout_id
        rewards = read_rewards(rollout_id, calls)
        return cls(
            rollout_id,
            rollout.data_id,
            final_reward(rollout_id, rollout.reward, rewards),
            rollout.status,
            index,
            open=False,
            call_rewards=rewards,
            call_credits=read_credits(rollout_id, calls),
            finish_reasons=[call.finish_reason for call in calls],
        )

    def entry(
        self, fill: float, n_rows: int, accounting: Accounting, *, truncated: bool, zeroed: bool
    ) -> RolloutEntry:
        """The rollout's entry in the rollout table.

        Args:
            fill: reward of a rollout without one.
            n_rows, accounting, truncated: as in `RolloutEntry`.
            zeroed: replace the reward by 0 and ignore call rewards.
        """
        reward = fill if self.reward is None else self.reward
        has_own = not zeroed and any(own is not None for own in self.call_rewards)
        return RolloutEntry(
            self.rollout_id,
            self.data_id,
            0.0 if zeroed else reward,
            self.reward is not None,
            len(self.call_rewards),
            n_rows,
            accounting,
            truncated,
            self.status,
            tuple(self.call_rewards) if has_own else None,
            tuple(self.call_credits) if any(each != 1.0 for each in self.call_credits) else None,
        )


class Counts:
    """The planner's counts, per rollout and in total."""

    def __init__(self, table: NDArray[np.int64]) -> None:
        self._table = table
        self._lines = table.tolist()

    def column(self, name: str) -> NDArray[np.int64]:
        """One count per rollout, (rollouts,)."""
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
    """All mismatches with their kinds; ``retokenised`` is recognised only with a tokenizer."""
    ids = list(rollout_ids)
    collected = []
    for rollout, call, length, index, kind_code, chain, closest, context in planner.mismatches():
        kind = _KINDS[kind_code]
        if tokenizer is not None and kind not in ("shortened", "positions_changed"):
            before = planner.context(rollout, closest, index, context).tolist()
            prompt = planner.context(rollout, chain, index, length).tolist()
            if is_retokenised(tokenizer, before, prompt):
                kind = "retokenised"
        collected.append(Mismatch(ids[rollout], call, index, kind))
    return collected
