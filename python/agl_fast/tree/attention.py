"""The attention function of Hugging Face models that train on trees."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface

from agl_fast.tree.ancestors import Links
from agl_fast.tree.engine_name import ENGINE
from agl_fast.tree.flex import ancestor_blocks, flex_tree_attention
from agl_fast.tree.segments import segment_attention

NAME = ENGINE


class Tree:
    """The tree of T tokens, passed to a model's layers as the keyword `tree`.

    Args:
        links: of the tokens.
        device: of the model.

    Attributes:
        n_layers: number of layers that have used it.
    """

    def __init__(self, links: Links, device: torch.device) -> None:
        self.runs = links.runs
        self.blocks: BlockMask | None = None
        if device.type != "cpu":
            self.blocks = ancestor_blocks(torch.from_numpy(links.ends).to(device))
        self.n_layers = 0


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    tree: Tree | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of every token to itself and its ancestors. Registered as `NAME`.

    Args:
        query: (1, H, T, D).
        key, value: (1, K, T, D).
        attention_mask: must be None; the tree replaces it.

    Returns:
        (1, T, H, D), and no weights.

    Raises:
        ValueError: there is no tree, or the layer requires another kind of attention.
    """
    unsupported = {
        "attention_mask": attention_mask,
        "dropout": dropout or None,
        "sliding_window": sliding_window,
        "softcap": softcap,
        "s_aux": s_aux,
    }
    other = [name for name, value in unsupported.items() if value is not None]
    if other or tree is None:
        raise ValueError(
            f"{type(module).__name__} attends with {', '.join(other) or 'no tree'}: expected a "
            "tree of plain causal attention"
        )
    tree.n_layers += 1
    if tree.blocks is None:
        return segment_attention(query, key, value, tree.runs, scaling), None
    return flex_tree_attention(query, key, value, tree.blocks, scaling), None


AttentionInterface.register(NAME, tree_attention)
