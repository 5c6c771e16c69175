"""Credit strategies: functions from a rollout to one whose calls say what they learn from.

A call's `credit` is its share of the rollout's advantage, its `reward` what it earned itself.
docs/algorithm.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy

import agl_fast


def trainable_calls(rollout: agl_fast.Rollout) -> list[int]:
    """Indices of the calls that can be trained: docs/rows.md, "Decisions", Classes."""
    seen: set[str] = set()
    found = []
    for index, call in enumerate(rollout.calls):
        if call.response_id and call.response_id in seen:
            continue
        if call.response_id:
            seen.add(call.response_id)
        if (
            call.trainable
            and call.finish_reason != "abort"
            and len(call.prompt_ids) > 0
            and len(call.response_ids) > 0
        ):
            found.append(index)
    return found


def identical(rollout: agl_fast.Rollout) -> agl_fast.Rollout:
    """Every call learns from the rollout's reward alike (arXiv 2508.03680)."""
    return rollout


def last_call(rollout: agl_fast.Rollout) -> agl_fast.Rollout:
    """Only the last trainable call learns."""
    return _with_credits(rollout, dict.fromkeys(trainable_calls(rollout)[-1:], 1.0))


def discounted(rollout: agl_fast.Rollout, discount: float) -> agl_fast.Rollout:
    """A call learns `discount` times as much as the next trainable one; the last one fully."""
    calls = trainable_calls(rollout)
    return _with_credits(
        rollout, {call: discount ** (len(calls) - 1 - i) for i, call in enumerate(calls)}
    )


def per_call(rollout: agl_fast.Rollout) -> agl_fast.Rollout:
    """Every call learns from its own reward, 0 where it has none.

    Where no call has one, the last trainable call has the rollout's.
    """
    rewards = [call.reward for call in rollout.calls]
    if all(reward is None or reward != reward for reward in rewards):
        calls = trainable_calls(rollout)
        if not calls:
            return rollout
        rewards[calls[-1]] = rollout.reward
    changed = [copy(call) for call in rollout.calls]
    for call, reward in zip(changed, rewards, strict=True):
        call.reward = 0.0 if reward is None or reward != reward else reward
    return _with_calls(rollout, changed)


# Names in `agentlightning.credit`.
STRATEGIES: dict[str, Callable[..., agl_fast.Rollout]] = {
    "identical": identical,
    "last_call": last_call,
    "discounted": discounted,
    "per_call": per_call,
}


def _with_credits(
    rollout: agl_fast.Rollout, credits_of_calls: Mapping[int, float]
) -> agl_fast.Rollout:
    """Calls that are not named have none."""
    changed = [copy(call) for call in rollout.calls]
    for index, call in enumerate(changed):
        call.credit = credits_of_calls.get(index, 0.0)
    return _with_calls(rollout, changed)


def _with_calls(rollout: agl_fast.Rollout, calls: Sequence[agl_fast.Call]) -> agl_fast.Rollout:
    changed = copy(rollout)
    changed.calls = calls
    return changed
