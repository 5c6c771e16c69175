"""Tree attention on an accelerator, with torch's flex_attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128


def ancestor_blocks(ends: torch.Tensor, block: int = BLOCK) -> BlockMask:
    """Block mask in which query q sees key k if k ≤ q < ends[k].

    Computed from each block's smallest and largest ends: needs (T / block)² memory, not T².

    Args:
        ends: (T,) int64 end of each token's subtree, exclusive (`ancestors.Links`).
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
    """Like `segments.segment_attention`, with a block mask instead of runs."""
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
    # Micro-batches differ in length.
    compiled: Callable[..., torch.Tensor] = torch.compile(flex_attention, dynamic=True)
    return compiled


def _numbered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of key blocks per query block, and their indices; (1, 1, n) and (1, 1, n, n) int32."""
    count = blocks.sum(dim=1).to(torch.int32)
    which = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return count[None, None], which[None, None]
