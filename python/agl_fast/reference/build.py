"""Rollouts in, batch out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agl_fast.reference.calls import RolloutLike
from agl_fast.reference.rollout import lay_out_rollout
from agl_fast.reference.rows import Row
from agl_fast.reference.tensors import columns, jagged_tensors, padded_tensors
from agl_fast.rows.accounting import Accounting, EmptyBatchError, Mismatch, RolloutEntry
from agl_fast.rows.options import RowKeywords, RowOptions, lists_row_options

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass
class Batch:
    """``agl_fast.Batch`` with lists in place of tensors and arrays, and without metrics."""

    tensors: dict[str, Any]
    columns: dict[str, list[Any]]
    rollouts: list[RolloutEntry]
    accounting: Accounting
    mismatches: list[Mismatch]


@lists_row_options(RowKeywords)
def build_batch(rollouts: Sequence[RolloutLike], **options: Unpack[RowKeywords]) -> Batch:
    """What ``agl_fast.build_batch`` builds, token by token.

    Args:
        rollouts: in the order of their rows.
        options: fields of `agl_fast.rows.options.RowOptions`.

    Raises:
        EmptyBatchError: nothing gave a row.
        ValueError: no rollouts, an infinite reward, a log-prob that is not finite.
    """
    if not rollouts:
        raise ValueError("no rollouts")
    chosen = RowOptions(**options)
    laid_out = [lay_out_rollout(rollout, chosen) for rollout in rollouts]
    accounting = sum((one.entry.accounting for one in laid_out), Accounting())
    rows: list[Row] = [row for one in laid_out for row in one.rows]
    if not rows:
        raise EmptyBatchError("no call gave a row", accounting)

    if chosen.layout == "jagged":
        tensors = jagged_tensors(rows, call_index=chosen.call_index)
    else:
        widths = chosen.max_prompt_length, chosen.max_response_length
        if chosen.trims:
            widths = max(len(row.prompt) for row in rows), max(len(row.response) for row in rows)
        tensors = padded_tensors(
            rows,
            prompt_width=widths[0],
            response_width=widths[1],
            pad_token_id=chosen.pad_token_id,
            call_index=chosen.call_index,
        )
    return Batch(
        tensors=tensors,
        columns=columns(rows, row_is_call=chosen.rules.row_is_call),
        rollouts=[one.entry for one in laid_out],
        accounting=accounting,
        mismatches=[mismatch for one in laid_out for mismatch in one.mismatches],
    )
