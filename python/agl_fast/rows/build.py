"""All rollouts at hand → one batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from agl_fast.rows.batch import Batch
from agl_fast.rows.builder import BatchBuilder
from agl_fast.rows.calls import Rollout
from agl_fast.rows.row_options import (
    TREE_MAX_TOKENS,
    Layout,
    Level,
    OverlongPrompt,
    TruncatedRollouts,
)


def build_batch(
    rollouts: Iterable[Rollout],
    *,
    level: Level = "trajectory",
    max_prompt_length: int,
    max_response_length: int,
    max_total_length: int | None = None,
    pad_token_id: int,
    overlong_prompt: OverlongPrompt | None = None,
    truncated_rollouts: TruncatedRollouts = "train",
    tree_max_tokens: int = TREE_MAX_TOKENS,
    reward_fillna_value: float = 0.0,
    trim: bool = False,
    layout: Layout = "padded",
    call_index: bool = False,
    tokenizer: Any = None,
    device: torch.device | str | None = None,
) -> Batch:
    """Turn rollouts into one PPO batch, as docs/rows.md says.

    Args:
        rollouts: in the order their rows shall stand.
        level: ``transition``, one row a call; ``trajectory``, calls merge into a row where a prompt
            extends the context before it; ``tree``, one row a rollout, its calls' prefix
            tree (docs/tree.md). Rows of trees are as wide as they are: the four options below are
            checked and not used, nor is ``trim``.
        max_prompt_length: P, at least 1.
        max_response_length: R, at least 1; a row keeps the first R response tokens.
        max_total_length: limit on a row's prompt and response together.
        pad_token_id: id written where no token is.
        overlong_prompt: ``spill`` moves the tokens past P into the response, untrained; ``drop``
            keeps the first P and marks the row. None: ``spill`` at level trajectory, else ``drop``.
        truncated_rollouts: what becomes of a rollout that lost sampled tokens to a limit:
            ``train`` the rest, ``mask`` its rows, or train it with ``zero_reward``.
        tree_max_tokens: level tree: a rollout whose tree has more tokens gives several rows, and a
            call that has more is dropped.
        reward_fillna_value: reward of rollouts that have none.
        trim: widths are the longest prompt and response of the batch instead of P and R.
        layout: ``padded`` or ``jagged`` (nested tensors).
        call_index: also give the call that sampled each response token.
        tokenizer: with ``decode``; tells retokenised text from rewritten history.
        device: where the tensors live; None means the CPU.

    Raises:
        TypeError, ValueError: an option, or a field of a rollout, is wrong; the message names it.
        EmptyBatchError: no call gave a row.
    """
    builder = BatchBuilder(
        level=level,
        max_prompt_length=max_prompt_length,
        max_response_length=max_response_length,
        max_total_length=max_total_length,
        pad_token_id=pad_token_id,
        overlong_prompt=overlong_prompt,
        truncated_rollouts=truncated_rollouts,
        tree_max_tokens=tree_max_tokens,
        reward_fillna_value=reward_fillna_value,
        trim=trim,
        layout=layout,
        call_index=call_index,
        tokenizer=tokenizer,
        device=device,
    )
    builder.add_many(rollouts)
    return builder.finish()
