"""Calls and rewards as the reference reads them, and which calls are laid out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class CallLike(Protocol):
    """Fields of a call that are read, from ``agl_fast.Call`` or any object."""

    prompt_ids: Any
    response_ids: Any
    log_probs: Any
    reward: Any
    response_id: Any
    finish_reason: Any
    trainable: Any


class RolloutLike(Protocol):
    """Fields of a rollout that are read, from ``agl_fast.Rollout`` or any object."""

    rollout_id: str
    data_id: str
    calls: Sequence[Any]
    reward: Any
    status: Any


@dataclass(frozen=True)
class Turn:
    """A call as lists; ``index`` is its index in ``rollout.calls``."""

    index: int
    prompt: list[int]
    response: list[int]
    log_probs: list[float] | None
    positions: list[list[int]] | None  # one list per dimension


def read_turn(rollout_id: str, index: int, call: CallLike) -> Turn:
    """Read a call. Raises ValueError for a log-prob that is not finite."""
    log_probs = None
    if call.log_probs is not None:
        log_probs = [float(value) for value in call.log_probs]
        for position, value in enumerate(log_probs):
            if not math.isfinite(value):
                raise ValueError(
                    f"rollout {rollout_id!r}: call {index}: log_probs[{position}] is {value}"
                )
    positions = _positions(call)
    return Turn(
        index,
        [int(token) for token in call.prompt_ids],
        [int(token) for token in call.response_ids],
        log_probs,
        None if positions is None else [[int(at) for at in dimension] for dimension in positions],
    )


@dataclass
class RecordedIds:
    """Prompt and response ids of a rollout's earlier calls, by response_id."""

    by_response_id: dict[Any, list[tuple[list[int], list[int]]]] = field(default_factory=dict)

    def of_same_id(self, call: CallLike) -> list[tuple[list[int], list[int]]]:
        return self.by_response_id.get(call.response_id, [])

    def add(self, call: CallLike, turn: Turn) -> None:
        if call.response_id not in (None, ""):
            ids = (turn.prompt, turn.response)
            self.by_response_id.setdefault(call.response_id, []).append(ids)


def reason_to_leave_out(call: CallLike, turn: Turn, recorded: RecordedIds) -> str | None:
    """Apply the four rules in order; None for a call that gets a row."""
    if (turn.prompt, turn.response) in recorded.of_same_id(call):
        return "duplicate"
    if call.finish_reason == "abort":
        return "aborted"
    if not call.trainable:
        return "excluded"
    if not turn.prompt or not turn.response:
        return "empty"
    return None


def final_reward(rollout: RolloutLike, fill: float) -> tuple[float, bool]:
    """(reward, has_reward): the rollout's own reward, else the last of a call, else ``fill``.

    NaN is missing like None. Raises ValueError for an infinite reward.
    """
    given = _read(rollout.reward, f"rollout {rollout.rollout_id!r}")
    of_calls = _of_calls(rollout)
    present = [reward for reward in [*of_calls, given] if reward is not None]
    return (present[-1], True) if present else (fill, False)


def n_dimensions(rollouts: Sequence[RolloutLike]) -> int | None:
    """Dimensions of the calls' positions; None if no call has positions."""
    given = (_positions(call) for rollout in rollouts for call in rollout.calls)
    return next((len(positions) for positions in given if positions is not None), None)


def _positions(call: Any) -> Any:
    return getattr(call, "position_ids", None)


def rewards_of_calls(rollout: RolloutLike) -> tuple[float | None, ...] | None:
    """One reward per call; None if no call has one."""
    of_calls = _of_calls(rollout)
    return tuple(of_calls) if any(reward is not None for reward in of_calls) else None


def credits_of_calls(rollout: RolloutLike) -> tuple[float, ...] | None:
    """One credit per call; None if all are 1."""
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
