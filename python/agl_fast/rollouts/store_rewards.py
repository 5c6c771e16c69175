"""Rewards in the store: emitted ones and the agent's return value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from agentlightning.emitter.reward import get_reward_value

from agl_fast.proxy import RecordedCall


def assign_rewards(spans: Sequence[Any], calls: Sequence[RecordedCall]) -> float | None:
    """Give each reward to the last call that was finished before it; of several the last counts.

    Args:
        spans: an attempt's, in the order of their sequence numbers.
        calls: the attempt's, likewise; their ``reward`` is set.

    Returns:
        The attempt's last reward, also if no call precedes it; None if it has none. NaN counts as
        none.
    """
    final = None
    for span in spans:
        reward = get_reward_value(span)
        if reward is None or math.isnan(reward):
            continue
        final = float(reward)
        before = [each.call for each in calls if each.sequence < span.sequence_id]
        if before:
            before[-1].reward = final
    return final
