"""Rows of one level, counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agl_fast.rows.accounting import Accounting, EmptyBatchError, Mismatch, RolloutEntry
from agl_fast.rows.batch import Batch
from agl_fast.rows.builder import build_batch
from agl_fast.rows.calls import Rollout
from agl_fast.rows.levels import Level, LevelName
from agl_fast.rows.options import Limits


@dataclass(frozen=True, slots=True)
class Layout:
    """What ``build_batch`` makes of rollouts at a level, without the rows it marks: those leave
    before anything is computed.

    Attributes:
        level: of rows.
        rows: that take part in the update.
        marked_rows: those with ``is_drop_mask``.
        tokens: of all rows, without padding.
        longest_prompt, longest_response, longest_row: in tokens.
        padded_tokens: as wide as the limits say, or the longest where there is none: rows × (P +
            R). None at level tree, which stock verl cannot train.
        attended: pairs of a token and one it attends to, itself included.
        scored: positions whose logits are computed: every token of a row, as verl does; at level
            tree one for each trained token.
        accounting: of sampled tokens.
    """

    level: LevelName
    rows: int
    marked_rows: int
    tokens: int
    longest_prompt: int
    longest_response: int
    longest_row: int
    padded_tokens: int | None
    attended: int
    scored: int
    accounting: Accounting

    @property
    def lost(self) -> int:
        """Sampled tokens that are not trained although a limit alone stands against it."""
        reasons = self.accounting.dropped_by_reason
        of_limits = ("overlong_prompt", "truncated_rollout", "overlong_call")
        return self.accounting.truncated + sum(reasons[reason] for reason in of_limits)


@dataclass(frozen=True, slots=True, eq=False)
class LaidOut:
    """A layout with what its batch says of rollouts and calls; empty where no row was left."""

    layout: Layout
    rollouts: Sequence[RolloutEntry]
    mismatches: Sequence[Mismatch]


def lay_out(
    rollouts: Sequence[Rollout], level: LevelName, limits: Limits, tokenizer: Any = None
) -> LaidOut:
    """
    Args:
        tokenizer: with ``decode``; tells retokenised text from rewritten history.

    Raises:
        TypeError, ValueError: a limit, or a field of a rollout, is wrong; the message names it.
    """
    try:
        options = limits.options(level, layout="jagged", tokenizer=tokenizer)
        batch = build_batch(rollouts, **options.keywords())
    except EmptyBatchError as error:
        padded = None if Level.of(level).is_tree else 0
        nothing = Layout(level, 0, 0, 0, 0, 0, 0, padded, 0, 0, error.accounting)
        return LaidOut(nothing, [], [])
    return LaidOut(_counted(batch, level, limits), batch.rollouts, batch.mismatches)


def _counted(batch: Batch, level: LevelName, limits: Limits) -> Layout:
    kept = ~batch.tensors["is_drop_mask"].numpy()
    prompts, responses, rows = (
        _lengths(batch.tensors[name]) for name in ("prompts", "responses", "input_ids")
    )
    # A position is the number of tokens above, at every level.
    positions: NDArray[np.int64] = batch.tensors["position_ids"].values().numpy()
    attended = int((positions + 1)[np.repeat(kept, rows)].sum())
    n_rows, tokens = int(kept.sum()), int(rows[kept].sum())
    longest_prompt, longest_response, longest_row = (
        int(lengths[kept].max(initial=0)) for lengths in (prompts, responses, rows)
    )
    if Level.of(level).is_tree:
        padded, scored = None, int(batch.tensors["response_mask"].values().sum())
    else:
        width = (limits.max_prompt_length or longest_prompt) + (
            limits.max_response_length or longest_response
        )
        padded, scored = n_rows * width, tokens
    return Layout(
        level=level,
        rows=n_rows,
        marked_rows=len(kept) - n_rows,
        tokens=tokens,
        longest_prompt=longest_prompt,
        longest_response=longest_response,
        longest_row=longest_row,
        padded_tokens=padded,
        attended=attended,
        scored=scored,
        accounting=batch.accounting,
    )


def _lengths(nested: Any) -> NDArray[np.int64]:
    lengths: NDArray[np.int64] = nested.offsets().diff().numpy()
    return lengths
