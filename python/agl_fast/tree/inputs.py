"""A micro-batch of rows as model inputs, and model outputs as rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from agl_fast.tree.ancestors import link
from agl_fast.tree.attention import Tree


@dataclass(frozen=True)
class TreeInputs:
    """The T tokens of all rows, concatenated; N of them are trained.

    Attributes:
        ids, depths: (1, T) int64.
        tree: for the attention.
        trained: (N,) indices of the trained tokens.
        parents: (N,) indices of their parents.
        tokens: (N,) their ids.
        row: (N,) their rows.
    """

    ids: torch.Tensor
    depths: torch.Tensor
    tree: Tree
    trained: torch.Tensor
    parents: torch.Tensor
    tokens: torch.Tensor
    row: torch.Tensor
    _offsets: torch.Tensor

    @classmethod
    def of(cls, micro_batch: Any) -> TreeInputs:
        """The inputs of a micro-batch.

        Args:
            micro_batch: verl's, without padding: nested input_ids and position_ids; response_mask
                and attention_mask, (b, R) and (b, P + R).

        Raises:
            ValueError: position_ids are not depths, or a trained token has no parent.
        """
        nested = micro_batch["input_ids"]
        ids, depths = nested.values(), micro_batch["position_ids"].values()
        if depths.shape != ids.shape:
            raise ValueError(
                f"position_ids of shape {tuple(depths.shape)} for {len(ids)} tokens: expected one "
                "a token, as trees have no multi-dimensional positions"
            )
        links = link(depths.cpu().numpy())
        response_mask = micro_batch["response_mask"]
        width = response_mask.shape[1]
        n_responses = micro_batch["attention_mask"][:, -width:].sum(dim=1)
        row, column = response_mask.nonzero(as_tuple=True)
        trained = (nested.offsets()[1:] - n_responses)[row] + column
        parents = torch.from_numpy(links.parents).to(ids.device)[trained]
        if (parents < 0).any():
            position = int(trained[parents < 0][0])
            raise ValueError(
                f"token {position} of the micro-batch is trained and has no parent: expected every "
                "sampled token to follow a prompt"
            )
        return cls(
            ids=ids[None],
            depths=depths[None],
            tree=Tree(links, ids.device),
            trained=trained,
            parents=parents,
            tokens=ids[trained],
            row=row,
            _offsets=nested.offsets(),
        )

    def in_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Nested tensor of values (N,): the value of token i at i - 1, as in verl, 0 elsewhere."""
        at_tokens = values.new_zeros(self.ids.shape[1]).index_copy(0, self.trained - 1, values)
        return torch.nested.nested_tensor_from_jagged(at_tokens, self._offsets)
