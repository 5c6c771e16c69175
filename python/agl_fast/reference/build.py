"""Rollouts in, batch out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agl_fast.reference.calls import RolloutLike
from agl_fast.reference.rollout import lay_out_rollout
from agl_fast.reference.rows import Limits, Row
from agl_fast.reference.tensors import columns, jagged_tensors, padded_tensors
from agl_fast.rows.accounting import Accounting, EmptyBatchError, Mismatch, RolloutEntry


@dataclass
class Batch:
    """``agl_fast.Batch`` with lists in place of tensors and arrays, and without metrics."""

    tensors: dict[str, Any]
    columns: dict[str, list[Any]]
    rollouts: list[RolloutEntry]
    accounting: Accounting
    mismatches: list[Mismatch]


def build_batch(
    rollouts: Sequence[RolloutLike],
    *,
    level: str = "trajectory",
    max_prompt_length: int,
    max_response_length: int,
    max_total_length: int | None = None,
    pad_token_id: int,
    overlong_prompt: str | None = None,
    truncated_rollouts: str = "train",
    tree_max_tokens: int = 16384,
    reward_fillna_value: float = 0.0,
    trim: bool = False,
    layout: str = "padded",
    call_index: bool = False,
    tokenizer: Any = None,
) -> Batch:
    """What ``agl_fast.build_batch`` builds, token by token.

    Raises:
        EmptyBatchError: nothing gave a row.
        ValueError: no rollouts, an infinite reward, a log-prob that is not finite.
    """
    if not rollouts:
        raise ValueError("no rollouts")
    if overlong_prompt is None:
        overlong_prompt = "drop" if level == "transition" else "spill"
    limits = Limits(max_prompt_length, max_response_length, max_total_length, overlong_prompt)
    laid_out = [
        lay_out_rollout(
            rollout,
            level=level,
            limits=limits,
            truncated_rollouts=truncated_rollouts,
            tree_max_tokens=tree_max_tokens,
            reward_fillna_value=reward_fillna_value,
            tokenizer=tokenizer,
        )
        for rollout in rollouts
    ]
    accounting = sum((one.entry.accounting for one in laid_out), Accounting())
    rows: list[Row] = [row for one in laid_out for row in one.rows]
    if not rows:
        raise EmptyBatchError("no call gave a row", accounting)

    trim = trim or level == "tree"
    if layout == "jagged":
        tensors = jagged_tensors(rows, call_index=call_index)
    else:
        tensors = padded_tensors(
            rows,
            prompt_width=max(len(row.prompt) for row in rows) if trim else max_prompt_length,
            response_width=max(len(row.response) for row in rows) if trim else max_response_length,
            pad_token_id=pad_token_id,
            call_index=call_index,
        )
    return Batch(
        tensors=tensors,
        columns=columns(rows, level=level),
        rollouts=[one.entry for one in laid_out],
        accounting=accounting,
        mismatches=[mismatch for one in laid_out for mismatch in one.mismatches],
    )
