"""The rows of one training step, from the daemon's batch to verl's workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import agl_fast
from agl_fast.training.trained_tokens import TrainedTokens, on_trained

Columns = Mapping[str, NDArray[Any]]


@dataclass(eq=False)
class Rows:
    """B rows of P prompt and R response tokens, and the rollouts that they come from.

    Attributes:
        tensors: by name, (B, …): those of the batch (docs/rows.md), and what the step adds.
        columns: by name, (B,): those of the batch.
        rollouts: the rollout table, also rollouts without rows.
    """

    tensors: dict[str, torch.Tensor]
    columns: Columns
    rollouts: list[agl_fast.RolloutEntry]

    @classmethod
    def of(cls, batch: agl_fast.Batch) -> Rows:
        """All rows of a batch."""
        return cls(dict(batch.tensors), batch.columns, batch.rollouts)

    def __len__(self) -> int:
        return len(self.tensors["responses"])

    def select(self, kept: torch.Tensor) -> Rows:
        """The rows for which `kept`, (B,) bool, is True."""
        return Rows(
            {name: values[kept] for name, values in self.tensors.items()},
            {name: values[kept.numpy()] for name, values in self.columns.items()},
            self.rollouts,
        )

    @property
    def response_mask(self) -> torch.Tensor:
        """(B, R) int64, 1 on trained tokens."""
        return self.tensors["response_mask"]

    @property
    def rollout_of_row(self) -> list[str]:
        """(B,) rollout ids."""
        ids: list[str] = self.columns["rollout_id_list"].tolist()
        return ids

    @property
    def group_of_row(self) -> list[str]:
        """(B,) data ids."""
        ids: list[str] = self.columns["data_id_list"].tolist()
        return ids

    @property
    def lengths(self) -> list[int]:
        """(B,) tokens of each row."""
        n_tokens: list[int] = self.tensors["attention_mask"].sum(dim=1).tolist()
        return n_tokens

    @property
    def call_index(self) -> torch.Tensor | None:
        """(B, R) int64 index of the call that sampled each trained token; None if unknown.

        At level transition, where a row is a call, the column `turn_index_list` is enough.
        """
        if "call_index" in self.tensors:
            return self.tensors["call_index"]
        if "turn_index_list" not in self.columns:
            return None
        turns = torch.from_numpy(np.asarray(self.columns["turn_index_list"], dtype=np.int64))
        return turns[:, None].expand(self.response_mask.shape)

    @property
    def has_branches(self) -> bool:
        """Whether a row is a prefix tree: a token does not follow the one before it."""
        real = self.tensors["attention_mask"].bool()
        positions = self.tensors["position_ids"]
        if positions.dim() == 3:  # positions in several dimensions, which trees do not have
            return False
        follows = positions.diff(dim=1) == 1
        return bool((real[:, 1:] & real[:, :-1] & ~follows).any())

    def on_trained(self, values: torch.Tensor) -> torch.Tensor:
        """(B, R) of values, 0 on tokens that are not trained, also for NaN and infinity."""
        return on_trained(values, self.response_mask)

    def trained_tokens(self, *, by_call: bool) -> TrainedTokens:
        """The trained tokens, ordered by the rollout table.

        Args:
            by_call: within a rollout, order by calls. False: by rows, all tokens in call 0.

        Raises:
            ValueError: `by_call`, and the batch does not record which call sampled a token.
        """
        calls = self.call_index if by_call else torch.zeros_like(self.response_mask)
        if calls is None:
            raise ValueError(
                "the batch has no call_index: build it with call_index=True, as the tokens of a "
                "rollout are ordered by the calls that sampled them"
            )
        return TrainedTokens.of(
            self.response_mask,
            calls,
            self.rollout_of_row,
            [rollout.rollout_id for rollout in self.rollouts],
        )
