"""A finished rollout, and its form in training."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import agl_fast
from agl_fast.rows.calls import Rollout
from agl_fast.training.credit import trainable_calls

FailedRollouts: TypeAlias = Literal["skip", "zero"]
SUCCEEDED = "succeeded"


@dataclass(slots=True, eq=False)
class FinishedRollout(Rollout):
    """A finished rollout with the calls of its latest attempt.

    Attributes:
        rollout_id, data_id: the rollouts of one data_id form a group.
        calls: of the latest attempt, in order.
        reward: the store's last one; None if there is none.
        status: ``succeeded``, ``failed``, ``timeout``, ``unresponsive``, ``cancelled`` or
            ``deadline``.
        sample: the enqueued sample.
        discarded_attempts: number of attempts before the latest.
        queue_seconds: from enqueueing to the start of the attempt; None if none was started.
        seconds: from the start of the attempt to its end; None if none was started.
        call_seconds: total duration of its calls; parallel calls each count.
        error: the agent's exception, with its HTTP status if it has one; None if unknown.
    """

    status: str
    sample: Mapping[str, Any]
    discarded_attempts: int = 0
    queue_seconds: float | None = None
    seconds: float | None = None
    call_seconds: float = 0.0
    error: str | None = None

    @property
    def failed(self) -> bool:
        return has_failed(self)


# Its name in agl_fast 0.1.
Outcome = FinishedRollout


def has_failed(rollout: Rollout) -> bool:
    """Whether the rollout did not succeed. One without a status, as in token traces, succeeded."""
    return rollout.status not in (None, SUCCEEDED)


def n_sampled_tokens(rollout: Rollout) -> int:
    """Response tokens of all calls."""
    return sum(len(call.response_ids) for call in rollout.calls)


def rollout_for_training(rollout: Rollout, failed_rollouts: FailedRollouts) -> Rollout | None:
    """A copy of the rollout as the batch takes it; None if it leaves its group.

    Args:
        failed_rollouts: ``skip`` leaves out rollouts that failed or have no trainable call;
            ``zero`` gives failed ones reward 0.
    """
    copied = copy(rollout)
    if failed_rollouts == "skip":
        if has_failed(rollout) or not trainable_calls(rollout):
            return None
    elif has_failed(rollout):
        copied.calls = [_without_reward(call) for call in rollout.calls]
        copied.reward = 0.0
    return copied


def _without_reward(call: agl_fast.Call) -> agl_fast.Call:
    copied = copy(call)
    copied.reward = None
    return copied
