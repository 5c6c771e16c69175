"""A rollout as a JSON object."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agl_fast.recording.packing import as_ids, pack_ids, pack_log_probs
from agl_fast.rows.calls import Call, Rollout

# A call is told as a difference to one of so many before it: agents take turns, but not many.
_BASES = 32


def encode_rollout(rollout: Rollout) -> dict[str, Any]:
    """The object of docs/recording.md.

    Raises:
        TypeError, ValueError: a field is of the wrong type; the message names it.
    """
    where = f"rollout {rollout.rollout_id!r}"
    for name in ("rollout_id", "data_id"):
        if not isinstance(getattr(rollout, name), str):
            raise TypeError(f"{where}: {name} must be a str, got {getattr(rollout, name)!r}")
    encoded: dict[str, Any] = {"rollout_id": rollout.rollout_id, "data_id": rollout.data_id}
    _set(encoded, "reward", _number(rollout.reward, f"{where}: reward"))
    _set(encoded, "status", rollout.status)
    _set(encoded, "sample", None if rollout.sample is None else dict(rollout.sample))
    contexts: list[NDArray[np.int32]] = []
    encoded["calls"] = [
        _encode_call(call, contexts, f"{where}, call {index}")
        for index, call in enumerate(rollout.calls)
    ]
    return encoded


def _encode_call(call: Call, contexts: list[NDArray[np.int32]], where: str) -> dict[str, Any]:
    prompt = as_ids(call.prompt_ids, f"{where}: prompt_ids")
    response = as_ids(call.response_ids, f"{where}: response_ids")
    base, keep = _longest_shared(contexts, prompt)
    encoded: dict[str, Any] = {"base": base, "keep": keep} if keep else {}
    encoded["tail"] = pack_ids(prompt[keep:])
    encoded["response"] = pack_ids(response)
    contexts.append(np.concatenate([prompt, response]))
    if call.log_probs is not None:
        encoded["log_probs"] = pack_log_probs(call.log_probs, f"{where}: log_probs")
    _set(encoded, "reward", _number(call.reward, f"{where}: reward"))
    for name in ("response_id", "finish_reason", "policy_version", "agent"):
        _set(encoded, name, getattr(call, name))
    _set(encoded, "sampling", None if call.sampling is None else dict(call.sampling))
    if not call.trainable:
        encoded["trainable"] = False
    if call.credit != 1.0:
        encoded["credit"] = _number(call.credit, f"{where}: credit")
    return encoded


def _longest_shared(
    contexts: Sequence[NDArray[np.int32]], prompt: NDArray[np.int32]
) -> tuple[int, int]:
    """Of the last calls, the one that shares most with the prompt, and how much."""
    best, most = 0, 0
    for index in range(len(contexts) - 1, max(-1, len(contexts) - 1 - _BASES), -1):
        shared = _common_prefix(contexts[index], prompt)
        if shared > most:
            best, most = index, shared
        if most == len(prompt):
            break
    return best, most


def _common_prefix(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    n = min(len(first), len(second))
    differs = np.flatnonzero(first[:n] != second[:n])
    return int(differs[0]) if len(differs) else n


def _number(value: Any, where: str) -> float | bool | str | None:
    """JSON knows no NaN and no infinity: they are written as text."""
    if isinstance(value, (np.generic, np.ndarray)) or hasattr(value, "item"):
        value = value.item()
    if value is None or isinstance(value, (bool, int)):
        return value
    if not isinstance(value, float):
        raise TypeError(f"{where} must be a number, got {value!r}")
    return value if math.isfinite(value) else repr(value)


def _set(encoded: dict[str, Any], name: str, value: Any) -> None:
    if value is not None:
        encoded[name] = value
