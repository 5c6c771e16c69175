"""Credit strategies: functions from a rollout to one whose calls say what they learn from.

A call's `credit` is its share of the rollout's advantage, its `reward` what it earned itself.
docs/algorithm.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy

import agl_fast
from agl_fast.rows.calls import originals, trainable_calls
from agl_fast.rows.rewards import final_reward, read_rewards


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

    The reward of a call that was recorded several times counts once; if the records differ, the
    last one counts. Where no call has a reward, the last trainable call has the rollout's. The
    rollout's own reward is what `build_batch` makes of the given rollout; a rollout without any
    reward stays without one.

    Raises:
        TypeError, ValueError: a reward is not a finite number; the message names it.
    """
    given = read_rewards(rollout.rollout_id, rollout.calls)
    final = final_reward(rollout.rollout_id, rollout.reward, given)
    trainable = trainable_calls(rollout)
    rewards = [0.0] * len(given)
    if any(reward is not None for reward in given):
        for original, reward in zip(originals(rollout.calls), given, strict=True):
            if reward is not None:
                rewards[original] = reward
    elif final is not None and trainable:
        rewards[trainable[-1]] = final
    else:
        return rollout
    changed = _with_calls(rollout, [copy(call) for call in rollout.calls])
    for call, reward in zip(changed.calls, rewards, strict=True):
        call.reward = reward
    changed.reward = final
    return changed


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
