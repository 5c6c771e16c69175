"""The limits that would have cut nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from agl_fast.rows.build import build_batch
from agl_fast.rows.calls import Rollout
from agl_fast.rows.levels import LevelName
from agl_fast.rows.options import NO_LIMIT


@dataclass(frozen=True, slots=True)
class FittingLimits:
    """The smallest limits that hold every row of some rollouts.

    Attributes:
        max_prompt_length: of the longest first prompt, or the given P where prompts may spill.
        max_response_length: of the longest response beside that.
        max_total_length: of the longest row.
    """

    max_prompt_length: int
    max_response_length: int
    max_total_length: int


def fitting_limits(
    rollouts: Iterable[Rollout], *, level: LevelName, spill_from: int | None = None
) -> FittingLimits:
    """Lay the rollouts out without limits.

    Args:
        spill_from: P, where what is longer moves into the response.

    Raises:
        EmptyBatchError: none of them gives a row.
    """
    batch = build_batch(
        rollouts,
        level=level,
        max_prompt_length=spill_from or NO_LIMIT,
        max_response_length=NO_LIMIT,
        pad_token_id=0,
        layout="jagged",
        overlong_prompt="drop" if spill_from is None else "spill",
    )
    prompts, responses = (_lengths(batch.tensors[name]) for name in ("prompts", "responses"))
    return FittingLimits(
        spill_from or int(prompts.max()),
        int(responses.max()),
        int((prompts + responses).max()),
    )


def _lengths(nested: Any) -> torch.Tensor:
    lengths: torch.Tensor = nested.offsets().diff()
    return lengths
