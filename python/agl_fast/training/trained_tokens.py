"""The trained tokens of a batch as sequences, of rollouts or of calls, whatever their rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


def on_trained(values: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """(B, R) of values, 0 where the mask is 0, also where a value there is NaN or infinite."""
    return torch.where(response_mask.bool(), values, torch.zeros_like(values))


@dataclass(frozen=True)
class Sequences:
    """S sequences of the N trained tokens, L in the longest.

    Attributes:
        position: (N,) where each token stands in (B, R) read row by row; sequence after sequence.
        number: (N,) which sequence it belongs to.
        place: (N,) how many tokens of its sequence precede it.
        lengths: (S,) tokens, also 0.
    """

    position: Numbers
    number: Numbers
    place: Numbers
    lengths: Numbers

    @classmethod
    def of(cls, position: Numbers, number: Numbers, n_sequences: int) -> Sequences:
        lengths = np.bincount(number, minlength=n_sequences).astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        return cls(position, number, np.arange(len(number)) - starts[number], lengths)

    @property
    def shape(self) -> tuple[int, int]:
        """(S, L); L is at least 1."""
        return len(self.lengths), max(1, int(self.lengths.max(initial=0)))

    @property
    def mask(self) -> torch.Tensor:
        """(S, L) bool, True on tokens."""
        return torch.arange(self.shape[1]) < torch.from_numpy(self.lengths)[:, None]

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """(S, L) of values (B, R), 0 where no token is."""
        gathered = values.new_zeros(self.shape)
        gathered[self.number, self.place] = values.reshape(-1)[self.position]
        return gathered

    def scatter(self, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Shape and dtype of `like` (B, R), of values (S, L), 0 on what is not trained."""
        scattered = torch.zeros_like(like)
        tokens = values[self.number, self.place].to(like.dtype)
        scattered.view(-1)[torch.from_numpy(self.position)] = tokens
        return scattered


@dataclass(frozen=True)
class TrainedTokens:
    """N tokens, rollout after rollout, each in the order of its calls.

    Attributes:
        position: (N,) where each stands in (B, R) read row by row.
        rollout: (N,) number of its rollout.
        call: (N,) index of the call that sampled it.
        n_rollouts: also those without a trained token.
    """

    position: Numbers
    rollout: Numbers
    call: Numbers
    n_rollouts: int

    @classmethod
    def of(
        cls,
        response_mask: torch.Tensor,
        call_index: torch.Tensor,
        rollout_of_row: Iterable[Any],
        rollout_ids: Sequence[Any],
    ) -> TrainedTokens:
        """
        Args:
            response_mask: (B, R) 1 on trained tokens.
            call_index: (B, R) of them.
            rollout_of_row: (B,) rollout_id.
            rollout_ids: of every rollout; their order numbers them.
        """
        numbers = {rollout_id: number for number, rollout_id in enumerate(rollout_ids)}
        of_row = np.array([numbers[each] for each in rollout_of_row], dtype=np.int64)
        row, column = response_mask.numpy().nonzero()
        position = row * response_mask.shape[1] + column
        rollout, call = of_row[row], call_index.numpy()[row, column].astype(np.int64)
        order = np.lexsort((position, call, rollout))
        return cls(position[order], rollout[order], call[order], len(rollout_ids))

    def by_rollout(self) -> Sequences:
        """One sequence a rollout: its calls one after another."""
        return Sequences.of(self.position, self.rollout, self.n_rollouts)

    def by_call(self) -> tuple[Sequences, Numbers, Numbers]:
        """One sequence for each call that has a trained token: (C, …), their rollouts and calls."""
        begins = np.ones(len(self.position), dtype=bool)
        begins[1:] = (np.diff(self.rollout) != 0) | (np.diff(self.call) != 0)
        number = np.cumsum(begins) - 1
        n_calls = int(begins.sum())
        sequences = Sequences.of(self.position, number, n_calls)
        return sequences, self.rollout[begins], self.call[begins]


def call_numbers(
    tensors: Mapping[str, torch.Tensor], columns: Mapping[str, NDArray[Any]]
) -> torch.Tensor:
    """(B, R) the call of each trained token.

    Raises:
        ValueError: the batch does not say which call sampled a token.
    """
    if "call_index" in tensors:
        return tensors["call_index"]
    if "turn_index_list" in columns:  # level transition: a row is a call
        turns = torch.from_numpy(np.asarray(columns["turn_index_list"], dtype=np.int64))
        return turns[:, None].expand(tensors["response_mask"].shape)
    raise ValueError(
        "the batch has no call_index: build it with call_index=True, as the tokens of a rollout "
        "are ordered by the calls that sampled them"
    )
