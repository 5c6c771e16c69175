"""Convert rollouts to and from the JSON objects of recordings (docs/recording.md)."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from agl_fast.rows.calls import Call, Rollout

T = TypeVar("T")

_INT32 = np.iinfo(np.int32)
_IDS = np.dtype("<i4")
_LOG_PROBS = np.dtype("<f4")
# A call is stored as a delta to one of the last calls; several agents may take turns.
_BASES = 32
_ROLLOUT_FIELDS = ("rollout_id", "data_id", "reward", "status", "sample", "calls")
_CALL_FIELDS = (
    "base",
    "keep",
    "tail",
    "response",
    "log_probs",
    "reward",
    "response_id",
    "finish_reason",
    "policy_version",
    "sampling",
    "agent",
    "trainable",
    "credit",
    "position_ids",
)
_NOT_FINITE = ("nan", "inf", "-inf")
_TRACE_FIELDS = ("id", "group", "reward", "calls")


def encode_rollout(rollout: Rollout) -> dict[str, Any]:
    """Convert a rollout to the object of docs/recording.md.

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
    if call.position_ids is not None:
        encoded["position_ids"] = [
            pack_ids(as_ids(dimension, f"{where}: position_ids")) for dimension in call.position_ids
        ]
    return encoded


def _longest_shared(
    contexts: Sequence[NDArray[np.int32]], prompt: NDArray[np.int32]
) -> tuple[int, int]:
    """Find the recent call with the longest prefix shared with the prompt, and its length."""
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
    """Convert a number to JSON; NaN and infinities become strings."""
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


class FieldError(ValueError):
    """A field is missing, unknown or wrong; the message begins with its name."""


def decode_rollout(value: Mapping[str, Any]) -> Rollout:
    """Convert an object back to the rollout that ``encode_rollout`` was given.

    Raises:
        FieldError: a field is wrong.
    """
    refuse_unknown(value, _ROLLOUT_FIELDS, "")
    contexts: list[NDArray[np.int32]] = []
    calls = [
        _decode_call(call, contexts, f"calls[{index}]")
        for index, call in enumerate(required(value, "calls", list, ""))
    ]
    return Rollout(
        required(value, "rollout_id", str, ""),
        required(value, "data_id", str, ""),
        calls,
        number(value, "reward", ""),
        status=optional(value, "status", str, ""),
        sample=optional(value, "sample", dict, ""),
    )


def _decode_call(value: Any, contexts: list[NDArray[np.int32]], where: str) -> Call:
    if not isinstance(value, dict):
        raise FieldError(f"{where}: expected an object, got {value!r}")
    dot = f"{where}."
    refuse_unknown(value, _CALL_FIELDS, dot)
    tail = _unpacked(value, "tail", unpack_ids, dot)
    prompt = continued(
        contexts, optional(value, "base", int, dot), optional(value, "keep", int, dot), tail, dot
    )
    response = _unpacked(value, "response", unpack_ids, dot)
    contexts.append(np.concatenate([prompt, response]))
    credit = number(value, "credit", dot)
    trainable = optional(value, "trainable", bool, dot)
    return Call(
        prompt,
        response,
        _unpacked(value, "log_probs", unpack_log_probs, dot) if "log_probs" in value else None,
        number(value, "reward", dot),
        response_id=optional(value, "response_id", str, dot),
        finish_reason=optional(value, "finish_reason", str, dot),
        policy_version=optional(value, "policy_version", int, dot),
        sampling=optional(value, "sampling", dict, dot),
        agent=optional(value, "agent", str, dot),
        trainable=True if trainable is None else trainable,
        credit=1.0 if credit is None else credit,
        position_ids=_positions(value, len(contexts[-1]), dot),
    )


def _positions(value: Mapping[str, Any], n_tokens: int, where: str) -> NDArray[np.int64] | None:
    """Read positions, int64 (D, N)."""
    packed = optional(value, "position_ids", list, where)
    if packed is None:
        return None
    dimensions = [
        _unpacked({"position_ids": each}, "position_ids", unpack_ids, where) for each in packed
    ]
    if not dimensions or any(len(dimension) != n_tokens for dimension in dimensions):
        lengths = [len(dimension) for dimension in dimensions]
        raise FieldError(
            f"{where}position_ids: expected {n_tokens} positions, one per token, in each "
            f"dimension, got {lengths}"
        )
    return np.array(dimensions, np.int64)


def continued(
    contexts: Sequence[NDArray[np.int32]],
    base: int | None,
    keep: int | None,
    tail: NDArray[np.int32],
    where: str,
) -> NDArray[np.int32]:
    """Rebuild a prompt from its delta to an earlier call.

    Raises:
        FieldError: the call does not exist, or has fewer tokens than ``keep``.
    """
    if base is None and keep is None:
        return tail
    if base is None or keep is None:
        raise FieldError(f"{where}base and {where}keep stand together or not at all")
    if not 0 <= base < len(contexts):
        raise FieldError(f"{where}base: expected the index of an earlier call, got {base}")
    if not 0 <= keep <= len(contexts[base]):
        raise FieldError(
            f"{where}keep: expected 0 to {len(contexts[base])}, the length of call {base} with its "
            f"response, got {keep}"
        )
    return np.concatenate([contexts[base][:keep], tail])


def refuse_unknown(value: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    unknown = [name for name in value if name not in known]
    if unknown:
        raise FieldError(f"{where}{unknown[0]}: no such field; there are {', '.join(known)}")


def required(value: Mapping[str, Any], name: str, kind: type[T], where: str) -> T:
    if name not in value:
        raise FieldError(f"{where}{name}: missing")
    found = value[name]
    # In Python a bool is an int; in JSON it is not.
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        raise FieldError(f"{where}{name}: expected {_NAMES[kind]}, got {_shown(found)}")
    return found


def optional(value: Mapping[str, Any], name: str, kind: type[T], where: str) -> T | None:
    return None if value.get(name) is None else required(value, name, kind, where)


def number(value: Mapping[str, Any], name: str, where: str) -> float | None:
    """Read a number or bool; NaN and infinities are strings."""
    found = value.get(name)
    if found is None or isinstance(found, (bool, int)):
        return found
    if isinstance(found, float) and math.isfinite(found):
        return found
    if found not in _NOT_FINITE:
        raise FieldError(f"{where}{name}: expected a number, got {_shown(found)}")
    return float(found)


def _unpacked(
    value: Mapping[str, Any], name: str, unpack: Callable[[str], NDArray[Any]], where: str
) -> NDArray[Any]:
    try:
        return unpack(required(value, name, str, where))
    except FieldError:
        raise
    except ValueError as error:
        raise FieldError(f"{where}{name}: {error}") from None


_NAMES: dict[type, str] = {
    str: "a string",
    int: "a whole number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def is_trace(value: Mapping[str, Any]) -> bool:
    return "recording" not in value and "id" in value and "calls" in value


def decode_trace(value: Mapping[str, Any]) -> Rollout:
    """Convert ``{"id", "group", "reward", "calls": [[keep, prompt tail, response], …]}``.

    Raises:
        FieldError: a field is wrong.
    """
    refuse_unknown(value, _TRACE_FIELDS, "")
    contexts: list[NDArray[np.int32]] = []
    calls = []
    for index, call in enumerate(required(value, "calls", list, "")):
        where = f"calls[{index}]"
        if not isinstance(call, list) or len(call) != 3 or not isinstance(call[0], int):
            raise FieldError(f"{where}: expected [keep, prompt tail, response]")
        tail, response = (_ids(ids, where) for ids in call[1:])
        previous = index - 1 if index else None
        keep = call[0] if index or call[0] else None
        prompt = continued(contexts, previous, keep, tail, f"{where}.")
        contexts.append(np.concatenate([prompt, response]))
        calls.append(Call(prompt, response))
    return Rollout(
        required(value, "id", str, ""),
        required(value, "group", str, ""),
        calls,
        number(value, "reward", ""),
    )


def _ids(values: Any, where: str) -> NDArray[np.int32]:
    try:
        return as_ids(values, where)
    except (TypeError, ValueError) as error:
        raise FieldError(str(error)) from None


def as_ids(values: Any, where: str) -> NDArray[np.int32]:
    """Convert token ids to int32, (N,).

    Raises:
        TypeError: the values are not 1-D integers.
        ValueError: an id does not fit into int32.
    """
    array = np.asarray(values)
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(
            f"{where} must be a sequence of int, got {array.dtype} of shape {array.shape}"
        )
    if array.min() < _INT32.min or array.max() > _INT32.max:
        raise ValueError(f"{where} has ids that do not fit into int32")
    return array.astype(np.int32)


def pack_ids(ids: NDArray[np.int32]) -> str:
    return _pack(ids.astype(_IDS))


def pack_log_probs(values: Any, where: str) -> str:
    """Encode log-probs as base64 of float32.

    Raises:
        TypeError: the values are not 1-D numbers.
    """
    array = np.asarray(values)
    if array.size and (array.ndim != 1 or array.dtype.kind not in "iuf"):
        raise TypeError(
            f"{where} must be a sequence of float, got {array.dtype} of shape {array.shape}"
        )
    return _pack(array.reshape(-1).astype(_LOG_PROBS))


def unpack_ids(text: str) -> NDArray[np.int32]:
    """Decode token ids, int32 (N,).

    Raises:
        ValueError: the text is not base64 of 4-byte values.
    """
    return _unpack(text, _IDS).astype(np.int32)


def unpack_log_probs(text: str) -> NDArray[np.float32]:
    """Decode log-probs, float32 (N,).

    Raises:
        ValueError: as for ``unpack_ids``.
    """
    return _unpack(text, _LOG_PROBS).astype(np.float32)


def _pack(array: NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")


def _unpack(text: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    try:
        packed = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"expected base64: {error}") from None
    if len(packed) % dtype.itemsize:
        raise ValueError(f"expected a multiple of {dtype.itemsize} bytes, got {len(packed)}")
    return np.frombuffer(packed, dtype)
