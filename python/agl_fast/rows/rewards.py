"""Read and check rewards and credits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from numbers import Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agl_fast.rows.calls import Call

_FLOAT32_MAX = 3.4028234663852886e38


def read_reward(value: Any, where: str) -> float | None:
    """Convert a reward to float; None if it is missing (None or NaN).

    Args:
        value: any real number: bool, int, float, Fraction, Decimal, a numpy or torch scalar, or a
            0-d array or tensor.
        where: names the value in errors.

    Raises:
        TypeError: the value is not a real number.
        ValueError: the value is infinite, or not finite in float32.
    """
    if value is None:
        return None
    given = value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, (Real, Decimal)):
        raise TypeError(f"{where} must be a real number (float, int, bool) or None, got {given!r}")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{where} is {value!r}; rewards must be finite") from None
    except ValueError:  # Decimal("sNaN")
        return None
    if math.isnan(number):
        return None
    if abs(number) > _FLOAT32_MAX:
        raise ValueError(f"{where} is {number!r}; rewards must be finite")
    return number


def read_rewards(rollout_id: str, calls: Sequence[Call]) -> list[float | None]:
    """Read the reward of every call, also of calls that are not trained.

    Raises:
        TypeError, ValueError: as for ``read_reward``.
    """
    rewards: list[float | None] = []
    for index, call in enumerate(calls):
        try:
            reward = call.reward
        except AttributeError:
            raise TypeError(
                f"rollout {rollout_id!r}: calls[{index}] must be a Call, got {call!r}"
            ) from None
        if reward is not None:
            reward = read_reward(reward, f"rollout {rollout_id!r}, call {index}: reward")
        rewards.append(reward)
    return rewards


def final_reward(
    rollout_id: str, reward: Any, call_rewards: Sequence[float | None]
) -> float | None:
    """Return the rollout's own reward, else the last reward of a call, else None."""
    given = read_reward(reward, f"rollout {rollout_id!r}: reward")
    if given is not None:
        return given
    return next((own for own in reversed(call_rewards) if own is not None), None)


def read_credits(rollout_id: str, calls: Sequence[Call]) -> list[float]:
    """Read the credit of every call.

    Raises:
        TypeError, ValueError: as for ``read_credit``.
    """
    # Duck-typed calls may lack credit.
    given = [getattr(call, "credit", 1.0) for call in calls]
    if given.count(1.0) == len(given):
        return given
    return [
        read_credit(credit, f"rollout {rollout_id!r}, call {index}: credit")
        for index, credit in enumerate(given)
    ]


def read_credit(value: Any, where: str) -> float:
    """Convert a credit to float.

    Raises:
        TypeError: the value is not a real number, as `read_reward` has it, or is a bool.
        ValueError: the value is not finite.
    """
    given = value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (Real, Decimal)):
        raise TypeError(f"{where} must be a float, got {given!r}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{where} is {given!r}; credits must be finite")
    return number
