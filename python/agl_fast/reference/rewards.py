"""The final reward of a rollout."""

from __future__ import annotations

import math
from typing import Any

from agl_fast.reference.calls import RolloutLike


def final_reward(rollout: RolloutLike, fill: float) -> tuple[float, bool]:
    """(reward, has_reward): the rollout's own, else the last among its calls, else ``fill``.

    NaN is missing like None. Raises ValueError for an infinite reward.
    """
    given = _read(rollout.reward, f"rollout {rollout.rollout_id!r}")
    of_calls = _of_calls(rollout)
    present = [reward for reward in [*of_calls, given] if reward is not None]
    return (present[-1], True) if present else (fill, False)


def rewards_of_calls(rollout: RolloutLike) -> tuple[float | None, ...] | None:
    """One entry a call; None where no call has one."""
    of_calls = _of_calls(rollout)
    return tuple(of_calls) if any(reward is not None for reward in of_calls) else None


def credits_of_calls(rollout: RolloutLike) -> tuple[float, ...] | None:
    """One entry a call; None where all are 1."""
    given = tuple(float(getattr(call, "credit", 1.0)) for call in rollout.calls)
    return given if any(credit != 1.0 for credit in given) else None


def _of_calls(rollout: RolloutLike) -> list[float | None]:
    return [
        _read(call.reward, f"rollout {rollout.rollout_id!r}: call {index}")
        for index, call in enumerate(rollout.calls)
    ]


def _read(reward: Any, where: str) -> float | None:
    if reward is None:
        return None
    value = float(reward)
    if math.isinf(value):
        raise ValueError(f"{where}: reward is {value}")
    return None if math.isnan(value) else value
