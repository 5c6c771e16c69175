"""All rollouts at hand → one batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from agl_fast.rows.batch import Batch
from agl_fast.rows.builder import BatchBuilder
from agl_fast.rows.calls import Rollout
from agl_fast.rows.options import RowKeywords, lists_row_options

if TYPE_CHECKING:
    from typing_extensions import Unpack


@lists_row_options(RowKeywords)
def build_batch(
    rollouts: Iterable[Rollout],
    *,
    device: torch.device | str | None = None,
    **options: Unpack[RowKeywords],
) -> Batch:
    """Turn rollouts into one PPO batch, as docs/rows.md specifies.

    Args:
        rollouts: in the order of their rows.
        device: where the tensors live; None means the CPU.
        options: fields of `RowOptions`. Required: ``max_prompt_length``, ``max_response_length``,
            ``pad_token_id``.

    Raises:
        TypeError, ValueError: an option, or a field of a rollout, is wrong; the message names it.
        EmptyBatchError: no call gave a row.
    """
    builder = BatchBuilder(device=device, **options)
    builder.add_many(rollouts)
    return builder.finish()
