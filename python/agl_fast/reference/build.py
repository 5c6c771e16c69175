"""Build batches from rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agl_fast.reference.calls import (
    RecordedIds,
    RolloutLike,
    Turn,
    credits_of_calls,
    final_reward,
    n_dimensions,
    read_turn,
    reason_to_leave_out,
    rewards_of_calls,
)
from agl_fast.reference.chains import chain_per_call, merge_into_chains
from agl_fast.reference.rows import (
    CutChain,
    Row,
    columns,
    count,
    cut,
    drop_reason,
    is_truncated,
    jagged_tensors,
    padded_tensors,
)
from agl_fast.reference.tree import tree_rows
from agl_fast.rows.accounting import Accounting, EmptyBatchError, Mismatch, RolloutEntry
from agl_fast.rows.options import RowKeywords, RowOptions, lists_row_options

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass
class Batch:
    """``agl_fast.Batch`` with lists instead of tensors and arrays, and without metrics."""

    tensors: dict[str, Any]
    columns: dict[str, list[Any]]
    rollouts: list[RolloutEntry]
    accounting: Accounting
    mismatches: list[Mismatch]


@lists_row_options(RowKeywords)
def build_batch(rollouts: Sequence[RolloutLike], **options: Unpack[RowKeywords]) -> Batch:
    """Build the batch of ``agl_fast.build_batch``, token by token.

    Args:
        rollouts: in the order of their rows.
        options: fields of `agl_fast.rows.options.RowOptions`.

    Raises:
        EmptyBatchError: no call has a row.
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

    n_dims = n_dimensions(rollouts)
    if chosen.layout == "jagged":
        tensors = jagged_tensors(rows, call_index=chosen.call_index, n_dimensions=n_dims)
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
            n_dimensions=n_dims,
        )
    return Batch(
        tensors=tensors,
        columns=columns(rows, row_is_call=chosen.rules.row_is_call),
        rollouts=[one.entry for one in laid_out],
        accounting=accounting,
        mismatches=[mismatch for one in laid_out for mismatch in one.mismatches],
    )


@dataclass(frozen=True)
class LaidOutRollout:
    rows: list[Row]
    entry: RolloutEntry
    mismatches: list[Mismatch]


def lay_out_rollout(rollout: RolloutLike, options: RowOptions) -> LaidOutRollout:
    accounting = Accounting()
    turns = _turns_to_lay_out(rollout, accounting)
    reward, has_reward = final_reward(rollout, options.reward_fillna_value)
    of_calls = rewards_of_calls(rollout)
    truncated = False
    mismatches: list[Mismatch] = []
    if options.rules.is_tree:
        rows = tree_rows(rollout, turns, options.tree_max_tokens, reward, accounting)
    else:
        if options.rules.merges_calls:
            chains, mismatches = merge_into_chains(rollout.rollout_id, turns, options.tokenizer)
        else:
            chains = chain_per_call(turns)
        cut_chains = [cut(chain, options) for chain in chains]
        truncated = is_truncated(cut_chains)
        if truncated and options.zeroes_truncated:
            reward, of_calls = 0.0, None
        mask_rollout = truncated and options.masks_truncated
        rows = _chain_rows(rollout, cut_chains, mask_rollout, reward, accounting)

    entry = RolloutEntry(
        rollout_id=rollout.rollout_id,
        data_id=rollout.data_id,
        reward=reward,
        has_reward=has_reward,
        n_calls=len(rollout.calls),
        n_rows=len(rows),
        accounting=accounting,
        truncated=truncated,
        status=rollout.status,
        call_rewards=of_calls,
        call_credits=credits_of_calls(rollout),
    )
    return LaidOutRollout(rows, entry, mismatches)


def _chain_rows(
    rollout: RolloutLike,
    chains: list[CutChain],
    mask_rollout: bool,
    reward: float,
    accounting: Accounting,
) -> list[Row]:
    rows: list[Row] = []
    for chain in chains:
        reason = drop_reason(chain, mask_rollout=mask_rollout)
        count(chain, reason, accounting)
        if chain.n_kept > 0:
            row = Row(
                rollout_id=rollout.rollout_id,
                data_id=rollout.data_id,
                first_call=chain.first_call,
                prompt=chain.prompt,
                response=chain.response,
                sampled_by=chain.sampled_by,
                log_probs=chain.log_probs,
                positions=list(range(len(chain.prompt) + len(chain.response))),
                is_dropped=reason is not None,
                score=reward,
                given_positions=chain.positions,
            )
            rows.append(row)
    return rows


def _turns_to_lay_out(rollout: RolloutLike, accounting: Accounting) -> list[Turn]:
    turns: list[Turn] = []
    recorded = RecordedIds()
    for index, call in enumerate(rollout.calls):
        turn = read_turn(rollout.rollout_id, index, call)
        n_sampled = len(turn.response)
        accounting.sampled += n_sampled
        reason = reason_to_leave_out(call, turn, recorded)
        if reason != "duplicate" and recorded.of_same_id(call):
            accounting.response_id_clashes += 1
        recorded.add(call, turn)
        if reason is None:
            turns.append(turn)
        elif reason == "duplicate":
            accounting.duplicate += n_sampled
        else:
            accounting.dropped += n_sampled
            accounting.dropped_by_reason[reason] += n_sampled
            accounting.empty_calls += reason == "empty"
    return turns
