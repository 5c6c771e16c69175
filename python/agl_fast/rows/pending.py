"""A rollout that is planned; its reward is settled when the batch is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agl_fast.rows.accounting import Accounting, RolloutEntry
from agl_fast.rows.call_rewards import final_reward, read_credits, read_rewards
from agl_fast.rows.calls import Call, Rollout


@dataclass(slots=True)
class Pending:
    """What a batch says of a rollout besides its rows.

    Attributes:
        reward: None where it has none.
        index: its place in the batch.
        open: further calls may come.
        call_rewards, call_credits, finish_reasons: one entry a call.
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
        """A whole rollout.

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
        """
        Args:
            fill: reward of a rollout without one.
            zeroed: its rewards do not count.
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
