"""Calls that extended no earlier one, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agl_fast.batch.accounting import MISMATCH_KINDS, Mismatch
from agl_fast.batch.calls import Rollout

# What chat templates put behind the messages, such as an empty think block, is shorter.
_PROMPT_END = 32


@dataclass(frozen=True, slots=True)
class Break:
    """Calls of one kind (docs/rows.md, "Mismatches").

    Attributes:
        kind: one of ``MISMATCH_KINDS``.
        calls: of this kind.
        tokens: that they share with the closest chain, and that a row of their own repeats.
        at_prompt_end: calls of the kind ``new_conversation`` that differ only in the last
            ``_PROMPT_END`` tokens of that chain's first prompt: hardly a conversation of their own.
    """

    kind: str
    calls: int
    tokens: int
    at_prompt_end: int


def breaks_of(mismatches: Sequence[Mismatch], rollouts: Sequence[Rollout]) -> list[Break]:
    """By kind, those that occur."""
    of_kind: dict[str, list[Mismatch]] = defaultdict(list)
    for mismatch in mismatches:
        of_kind[mismatch.kind].append(mismatch)
    at_prompt_end = _at_prompt_end(of_kind["new_conversation"], rollouts)
    return [
        Break(
            kind,
            len(of_kind[kind]),
            sum(mismatch.index for mismatch in of_kind[kind]),
            at_prompt_end if kind == "new_conversation" else 0,
        )
        for kind in MISMATCH_KINDS
        if of_kind[kind]
    ]


def _at_prompt_end(mismatches: Sequence[Mismatch], rollouts: Sequence[Rollout]) -> int:
    of_id = {rollout.rollout_id: rollout for rollout in rollouts}
    prompts: dict[str, list[NDArray[Any]]] = {}
    found = 0
    for each in mismatches:
        if each.rollout_id not in prompts:
            calls = of_id[each.rollout_id].calls
            prompts[each.rollout_id] = [np.asarray(call.prompt_ids) for call in calls]
        found += _first_prompt_rest(each, prompts[each.rollout_id]) <= _PROMPT_END
    return found


def _first_prompt_rest(mismatch: Mismatch, prompts: Sequence[NDArray[Any]]) -> int:
    """Tokens of the closest chain's first prompt from the first difference on."""
    at, prompt = mismatch.index, prompts[mismatch.call]
    # All prompts of that chain agree so far; its first one is the shortest.
    return min(
        len(earlier) - at
        for earlier in prompts[: mismatch.call]
        if len(earlier) > at
        and earlier[at] != prompt[at]
        and np.array_equal(earlier[:at], prompt[:at])
    )
