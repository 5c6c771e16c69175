"""Calls that were recorded more than once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agl_fast.rows.calls import Call


def originals(calls: Sequence[Call]) -> list[int]:
    """For each call, the index of its first record: its own, unless it is a duplicate.

    A duplicate has the response_id, the prompt ids and the response ids of an earlier call
    (docs/rows.md, "Details", Classes).
    """
    of_id: dict[str, list[int]] = {}
    found = []
    for index, call in enumerate(calls):
        if not call.response_id:
            found.append(index)
            continue
        earlier = of_id.setdefault(call.response_id, [])
        same = next((each for each in earlier if _equal(calls[each], call)), index)
        if same == index:
            earlier.append(index)
        found.append(same)
    return found


def _equal(one: Call, other: Call) -> bool:
    return all(
        len(ids) == len(others) and np.array_equal(np.asarray(ids), np.asarray(others))
        for ids, others in (
            (one.response_ids, other.response_ids),
            (one.prompt_ids, other.prompt_ids),
        )
    )
