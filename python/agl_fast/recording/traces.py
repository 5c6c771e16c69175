"""Token traces without a header: ids alone, as lists, each call told by the one before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agl_fast.recording.decoding import FieldError, continued, number, refuse_unknown, required
from agl_fast.recording.packing import as_ids
from agl_fast.rows.calls import Call, Rollout

_FIELDS = ("id", "group", "reward", "calls")


def is_trace(value: Mapping[str, Any]) -> bool:
    return "recording" not in value and "id" in value and "calls" in value


def decode_trace(value: Mapping[str, Any]) -> Rollout:
    """A rollout of ``{"id", "group", "reward", "calls": [[keep, prompt tail, response], …]}``.

    Raises:
        FieldError: a field is wrong.
    """
    refuse_unknown(value, _FIELDS, "")
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
