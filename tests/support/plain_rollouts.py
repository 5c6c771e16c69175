"""Rollouts as plain data: what the reference reads, and what becomes ``agl_fast.Rollout``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class PlainCall:
    prompt_ids: list[int]
    response_ids: list[int]
    log_probs: list[float] | None = None
    reward: float | bool | None = None
    response_id: str | None = None
    finish_reason: str | None = None
    trainable: bool = True
    position_ids: list[list[int]] | None = None

    @property
    def context(self) -> list[int]:
        return self.prompt_ids + self.response_ids


@dataclass
class PlainRollout:
    calls: list[PlainCall]
    rollout_id: str = "r0"
    data_id: str = "d0"
    reward: float | bool | None = None
    status: str | None = None


def rollout(*calls: Any, **fields: Any) -> PlainRollout:
    """From calls like ``([1, 2], [3])`` or ``([1, 2], [3], {"response_id": "a"})``."""
    plain = [PlainCall(call[0], call[1], **(call[2] if len(call) > 2 else {})) for call in calls]
    return PlainRollout(plain, **fields)


@dataclass
class Containers:
    """How each call's ids and log-probs are handed over; one function per call and field."""

    ids: list[tuple[Any, Any]] = field(default_factory=list)
    log_probs: list[Any] = field(default_factory=list)


def to_native(plain: PlainRollout, containers: Containers | None = None) -> Any:
    """An ``agl_fast.Rollout``; without containers, its calls hold the lists themselves."""
    import agl_fast

    calls = []
    for index, call in enumerate(plain.calls):
        prompt_ids: Any = call.prompt_ids
        response_ids: Any = call.response_ids
        log_probs: Any = call.log_probs
        if containers is not None:
            prompt_ids, response_ids = containers.ids[index]
            log_probs = containers.log_probs[index]
        native = agl_fast.Call(
            prompt_ids,
            response_ids,
            log_probs,
            call.reward,
            response_id=call.response_id,
            finish_reason=call.finish_reason,
            trainable=call.trainable,
            position_ids=None
            if call.position_ids is None
            else np.array(call.position_ids, np.int64),
        )
        calls.append(native)
    return agl_fast.Rollout(
        plain.rollout_id, plain.data_id, calls, plain.reward, status=plain.status
    )
