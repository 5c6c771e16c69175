"""What a rollout left behind, and what becomes of it in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import agl_fast
from agl_fast.training.credit import trainable_calls

FailedRollouts: TypeAlias = Literal["skip", "zero"]
SUCCEEDED = "succeeded"


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """A finished rollout.

    Attributes:
        data_id: its sample's; rollouts of one sample form a group.
        status: ``succeeded``, ``failed``, ``timeout``, ``unresponsive``, ``cancelled`` or
            ``deadline``.
        calls: of the latest attempt.
        reward: the store's last one, None where it has none.
        discarded_attempts: attempts before the latest.
        error: the agent's exception, with its HTTP status if it has one; None where none is known.
        queue_seconds, seconds: from enqueueing to the attempt's start, and from there to the end;
            None where no attempt was started.
        call_seconds: total time in which its calls were in flight; parallel calls each count.
    """

    rollout_id: str
    data_id: str
    sample: Mapping[str, Any]
    status: str
    calls: Sequence[agl_fast.Call]
    reward: float | None
    discarded_attempts: int = 0
    queue_seconds: float | None = None
    seconds: float | None = None
    call_seconds: float = 0.0
    error: str | None = None

    @property
    def failed(self) -> bool:
        return self.status != SUCCEEDED

    @property
    def n_tokens(self) -> int:
        """Sampled tokens of all calls."""
        return sum(len(call.response_ids) for call in self.calls)

    @property
    def rollout(self) -> agl_fast.Rollout:
        """As it ended."""
        return agl_fast.Rollout(
            self.rollout_id,
            self.data_id,
            self.calls,
            self.reward,
            status=self.status,
            sample=self.sample,
        )

    def training_rollout(self, failed_rollouts: FailedRollouts) -> agl_fast.Rollout | None:
        """The rollout as the batch takes it; None: it leaves its group."""
        rollout = self.rollout
        if failed_rollouts == "skip":
            if self.failed or not trainable_calls(rollout):
                return None
        elif self.failed:
            rollout.calls = [_without_reward(call) for call in self.calls]
            rollout.reward = 0.0
        return rollout


def _without_reward(call: agl_fast.Call) -> agl_fast.Call:
    changed = copy(call)
    changed.reward = None
    return changed
