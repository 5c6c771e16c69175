"""What a rollout earned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from agl_fast.batch.calls import Call

_FLOAT32_MAX = 3.4028234663852886e38


def read_reward(value: Any, where: str) -> float | None:
    """A reward as float, or None where it is missing (None or NaN).

    Raises:
        TypeError: it is not a number. ValueError: it is infinite, or not finite in float32.
    """
    if value is None:
        return None
    if not isinstance(value, (int, float)):
        if getattr(value, "ndim", None) != 0:  # numpy and torch scalars have none
            raise TypeError(f"{where} must be a float, a bool or None, got {value!r}")
        value = value.item()
        if not isinstance(value, (int, float)):
            raise TypeError(f"{where} must be a float, a bool or None, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{where} is {value!r}; rewards must be finite") from None
    if math.isnan(number):
        return None
    if abs(number) > _FLOAT32_MAX:
        raise ValueError(f"{where} is {number!r}; rewards must be finite")
    return number


def final_reward(rollout_id: str, reward: Any, calls: Sequence[Call]) -> float | None:
    """The rollout's reward: the given one, else the last that a call has; None if there is none.

    Every reward is checked, also those that do not count.
    """
    given = read_reward(reward, f"rollout {rollout_id!r}: reward")
    last = None
    for index, call in enumerate(calls):
        try:
            reward_of_call = call.reward
        except AttributeError:
            raise TypeError(
                f"rollout {rollout_id!r}: calls[{index}] must be a Call, got {call!r}"
            ) from None
        if reward_of_call is not None:
            own = read_reward(reward_of_call, f"rollout {rollout_id!r}, call {index}: reward")
            last = last if own is None else own
    return last if given is None else given
