"""The same attention on an accelerator, by torch's flex_attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128


def ancestor_blocks(ends: torch.Tensor, block: int = BLOCK) -> BlockMask:
    """Which blocks of keys a block of queries sees: key k is above query q iff k ≤ q < ends[k].

    From each block's first and last ends, so that no T × T tensor is made, only (T / block)².

    Args:
        ends: (T,) int64 where the subtree below each token ends, exclusive (`links.Links`).
    """
    n_tokens = len(ends)
    n_blocks = -(-n_tokens // block)
    padded = torch.nn.functional.pad(ends, (0, n_blocks * block - n_tokens))
    of_blocks = padded.view(n_blocks, block)
    first_query = torch.arange(n_blocks, device=ends.device)[:, None] * block
    key_block = torch.arange(n_blocks, device=ends.device)[None]
    before = key_block * block < first_query
    seen = (before | (key_block * block == first_query)) & (of_blocks.amax(dim=1) > first_query)
    whole = before & (of_blocks.amin(dim=1) >= first_query + block)

    def is_above(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (query < padded[key])

    return BlockMask.from_kv_blocks(
        *_numbered(seen & ~whole),
        *_numbered(whole),
        BLOCK_SIZE=block,
        mask_mod=is_above,
        seq_lengths=(n_tokens, n_tokens),
    )


def flex_tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: BlockMask,
    scaling: float | None = None,
) -> torch.Tensor:
    """As `segments.segment_attention`, with blocks in place of runs."""
    attended = _compiled()(
        query,
        key,
        value,
        block_mask=blocks,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended.transpose(1, 2).contiguous()


@cache
def _compiled() -> Callable[..., torch.Tensor]:
    # Rows differ in length from one micro-batch to the next.
    compiled: Callable[..., torch.Tensor] = torch.compile(flex_attention, dynamic=True)
    return compiled


def _numbered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many key blocks each query block has, and which, those first; (1, 1, n[, n]) int32."""
    count = blocks.sum(dim=1).to(torch.int32)
    which = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return count[None, None], which[None, None]
