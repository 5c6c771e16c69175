"""A JSON object as a rollout, read strictly."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from agl_fast.recording.packing import unpack_ids, unpack_log_probs
from agl_fast.rows.calls import Call, Rollout

T = TypeVar("T")

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
)
_NOT_FINITE = ("nan", "inf", "-inf")


class FieldError(ValueError):
    """A field is missing, unknown or wrong; the message begins with its name."""


def decode_rollout(value: Mapping[str, Any]) -> Rollout:
    """The rollout that ``encode_rollout`` was given.

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
    )


def continued(
    contexts: Sequence[NDArray[np.int32]],
    base: int | None,
    keep: int | None,
    tail: NDArray[np.int32],
    where: str,
) -> NDArray[np.int32]:
    """A prompt told as a difference to an earlier call's context.

    Raises:
        FieldError: there is no such call, or it is not that long.
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
    # A bool is an int to Python only.
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        raise FieldError(f"{where}{name}: expected {_NAMES[kind]}, got {_shown(found)}")
    return found


def optional(value: Mapping[str, Any], name: str, kind: type[T], where: str) -> T | None:
    return None if value.get(name) is None else required(value, name, kind, where)


def number(value: Mapping[str, Any], name: str, where: str) -> float | None:
    """A number or bool as it stands; NaN and infinities are text."""
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
