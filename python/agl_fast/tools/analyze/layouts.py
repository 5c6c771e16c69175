"""Count the rows of one level."""

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
    """Rows that ``build_batch`` builds at a level; dropped rows are not counted as computed.

    Attributes:
        level: of the rows.
        rows: number of rows in the update.
        marked_rows: number of dropped rows (``is_drop_mask``).
        tokens: of the rows in the update, without padding.
        longest_prompt, longest_response, longest_row: in tokens.
        padded_tokens: rows × (P + R), with the longest prompt or response where no limit is set.
            None at level tree, which stock verl cannot train.
        attended: pairs of a token and a token that it attends to, including itself.
        scored: positions whose logits are computed: every token of a row, as in verl; at level
            tree one per trained token.
        accounting: sampled tokens by class.
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
        """Sampled tokens that are not trained because of a limit."""
        reasons = self.accounting.dropped_by_reason
        of_limits = ("overlong_prompt", "truncated_rollout", "overlong_call")
        return self.accounting.truncated + sum(reasons[reason] for reason in of_limits)


@dataclass(frozen=True, slots=True, eq=False)
class LaidOut:
    """A layout with the batch's rollout table and mismatches; both empty without rows."""

    layout: Layout
    rollouts: Sequence[RolloutEntry]
    mismatches: Sequence[Mismatch]


def lay_out(
    rollouts: Sequence[Rollout], level: LevelName, limits: Limits, tokenizer: Any = None
) -> LaidOut:
    """Build the rows of a level and count them.

    Args:
        rollouts: to build from.
        level: of the rows.
        limits: of the rows.
        tokenizer: object with ``decode``; distinguishes retokenised text from rewritten history.

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
    # At every level, a position is the number of tokens before it in its context.
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
