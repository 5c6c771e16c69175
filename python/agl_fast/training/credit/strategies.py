"""Credit strategies: functions that set the `credit` or `reward` of a rollout's calls.

A call's `credit` is the factor on the rollout's advantage; its `reward` is its own.
docs/algorithm.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy

import agl_fast
from agl_fast.rows.calls import originals, trainable_calls
from agl_fast.rows.rewards import final_reward, read_rewards


def identical(rollout: agl_fast.Rollout) -> agl_fast.Rollout:
    """Identical assignment: every call gets the rollout's advantage (arXiv 2508.03680)."""
    return rollout


def last_call(rollout: agl_fast.Rollout) -> agl_fast.Rollout:
    """Credit 1 for the last trainable call, 0 for the others."""
    return _with_credits(rollout, dict.fromkeys(trainable_calls(rollout)[-1:], 1.0))


def discounted(rollout: agl_fast.Rollout, discount: float) -> agl_fast.Rollout:
    """Credit 1 for the last trainable call, `discount` times the next one's for earlier calls."""
    calls = trainable_calls(rollout)
    return _with_credits(
        rollout, {call: discount ** (len(calls) - 1 - i) for i, call in enumerate(calls)}
    )


def per_call(rollout: agl_fast.Rollout) -> agl_fast.Rollout:
    """Every call gets its own reward, 0 if it has none.

    The reward of a duplicate call counts once; if the records differ, the last one counts. If no
    call has a reward, the last trainable call gets the rollout's. The rollout's final reward is the
    one that `build_batch` determines; a rollout without any reward is unchanged.

    Raises:
        TypeError, ValueError: a reward is not a finite number; the message names it.
    """
    recorded = read_rewards(rollout.rollout_id, rollout.calls)
    final = final_reward(rollout.rollout_id, rollout.reward, recorded)
    trainable = trainable_calls(rollout)
    rewards = [0.0] * len(recorded)
    if any(reward is not None for reward in recorded):
        for original, reward in zip(originals(rollout.calls), recorded, strict=True):
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
    """A copy of the rollout with these credits by call index, 0 for other calls."""
    changed = [copy(call) for call in rollout.calls]
    for index, call in enumerate(changed):
        call.credit = credits_of_calls.get(index, 0.0)
    return _with_calls(rollout, changed)


def _with_calls(rollout: agl_fast.Rollout, calls: Sequence[agl_fast.Call]) -> agl_fast.Rollout:
    changed = copy(rollout)
    changed.calls = calls
    return changed
