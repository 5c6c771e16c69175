"""The trained tokens of a batch as sequences of rollouts or calls, independent of rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


def on_trained(values: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """(B, R) of values, 0 where the mask is 0, also for NaN and infinity."""
    return torch.where(response_mask.bool(), values, torch.zeros_like(values))


@dataclass(frozen=True)
class Sequences:
    """The N trained tokens as S sequences of at most L tokens.

    Attributes:
        position: (N,) index of each token in the flattened (B, R), sequence after sequence.
        number: (N,) index of its sequence.
        place: (N,) index of the token in its sequence.
        lengths: (S,) tokens of each sequence; may be 0.
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
        """(S, L) of values (B, R), 0 beyond a sequence's end."""
        gathered = values.new_zeros(self.shape)
        gathered[self.number, self.place] = values.reshape(-1)[self.position]
        return gathered

    def scatter(self, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """(B, R) of values (S, L) with the dtype of `like` (B, R), 0 on untrained tokens."""
        scattered = torch.zeros_like(like)
        tokens = values[self.number, self.place].to(like.dtype)
        scattered.view(-1)[torch.from_numpy(self.position)] = tokens
        return scattered


@dataclass(frozen=True)
class TrainedTokens:
    """The N trained tokens, rollout after rollout, in the order of the rollout's calls.

    Attributes:
        position: (N,) index of each token in the flattened (B, R).
        rollout: (N,) index of its rollout.
        call: (N,) index of the call that sampled it.
        n_rollouts: number of rollouts, with or without trained tokens.
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
            call_index: (B, R) call that sampled each of them.
            rollout_of_row: (B,) rollout ids.
            rollout_ids: ids of all rollouts, in the order of their indices.
        """
        numbers = {rollout_id: number for number, rollout_id in enumerate(rollout_ids)}
        of_row = np.array([numbers[rollout_id] for rollout_id in rollout_of_row], dtype=np.int64)
        row, column = response_mask.numpy().nonzero()
        position = row * response_mask.shape[1] + column
        rollout, call = of_row[row], call_index.numpy()[row, column].astype(np.int64)
        order = np.lexsort((position, call, rollout))
        return cls(position[order], rollout[order], call[order], len(rollout_ids))

    def by_rollout(self) -> Sequences:
        """One sequence per rollout: its calls concatenated."""
        return Sequences.of(self.position, self.rollout, self.n_rollouts)

    def by_call(self) -> tuple[Sequences, Numbers, Numbers]:
        """One sequence per call with a trained token; (C,) rollout and call of each sequence."""
        begins = np.ones(len(self.position), dtype=bool)
        begins[1:] = (np.diff(self.rollout) != 0) | (np.diff(self.call) != 0)
        number = np.cumsum(begins) - 1
        n_calls = int(begins.sum())
        sequences = Sequences.of(self.position, number, n_calls)
        return sequences, self.rollout[begins], self.call[begins]
