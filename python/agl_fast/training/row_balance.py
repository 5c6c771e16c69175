"""Which row stands where: mini-batches of whole rollouts, equally full on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]

# Stands for a row that weighs nothing. As an index it is the last row, where it is kept.
FILLER = -1


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows in the order in which verl's workers take them: [rank][mini-batch][row].

    verl gives every data-parallel rank an equal stretch of the batch and cuts each stretch into
    equal mini-batches, so that a mini-batch must have equally many rows on every rank, and as many
    as the others.

    Attributes:
        order: row numbers, `FILLER` where there is none; no row stands in it twice.
        mini_batch_size: rows of a mini-batch on all ranks together, fillers included.
        n_mini_batches: mini-batches of the batch.
        n_ranks: data-parallel ranks.
    """

    order: Positions
    mini_batch_size: int
    n_mini_batches: int
    n_ranks: int

    @property
    def n_fillers(self) -> int:
        return int((self.order == FILLER).sum())

    def by_mini_batch(self) -> list[Positions]:
        """The rows of each mini-batch, without fillers, rank after rank."""
        slots = self.order.reshape(self.n_ranks, self.n_mini_batches, -1)
        return [slot[slot != FILLER] for slot in (slots[:, i] for i in range(self.n_mini_batches))]


def count_mini_batches(n_rollouts: int, rollouts_per_mini_batch: int) -> int:
    """Optimiser steps of one epoch: however many rows the rollouts became."""
    return -(-n_rollouts // rollouts_per_mini_batch)


def whole_rollouts(
    rollout_of_row: Sequence[Hashable],
    n_mini_batches: int,
    *,
    order: Iterable[Hashable] | None = None,
    seed: int | None = None,
) -> list[Positions]:
    """Deal the rollouts out to mini-batches, all rows of a rollout to one.

    Args:
        rollout_of_row: (B,) whose row it is.
        n_mini_batches: at most; there are never more than rollouts. Each gets as many rollouts as
            the others, give or take one.
        order: the rollouts to deal out, so that the order of the rows decides nothing; those
            without rows are passed over. None: all, in the order of their rows.
        seed: deals them out at random; None: in their order, so that groups stay together.

    Returns:
        The rows of each mini-batch.
    """
    rows: dict[Hashable, list[int]] = {}
    for row, rollout in enumerate(rollout_of_row):
        rows.setdefault(rollout, []).append(row)
    rollouts = [rollout for rollout in (rows if order is None else order) if rollout in rows]
    if seed is not None:
        np.random.default_rng(seed).shuffle(rollouts)
    shares = np.array_split(np.arange(len(rollouts)), min(n_mini_batches, len(rollouts)))
    return [
        np.array([row for place in share for row in rows[rollouts[place]]], dtype=np.int64)
        for share in shares
    ]


def lay_out(
    mini_batches: Sequence[Positions], lengths: Sequence[int], *, n_ranks: int, multiple: int = 1
) -> Layout:
    """Give every rank a share of every mini-batch and fill up with `FILLER`.

    Within a mini-batch the ranks get equally many rows, and nearly as many tokens as each other:
    the longest row that is left goes to the rank with the fewest tokens.

    Args:
        lengths: (B,) tokens of each row.
        multiple: of which a rank's rows of a mini-batch are one, as micro-batches of a fixed size
            need it.
    """
    longest = max(len(mini_batch) for mini_batch in mini_batches)
    per_rank = -(-longest // (n_ranks * multiple)) * multiple
    order = np.full((n_ranks, len(mini_batches), per_rank), FILLER, dtype=np.int64)
    for number, mini_batch in enumerate(mini_batches):
        ranks = [(0, 0, rank) for rank in range(n_ranks)]  # tokens, rows, rank
        for row in sorted(mini_batch.tolist(), key=lambda row: -lengths[row]):
            n_tokens, n_rows, rank = heapq.heappop(ranks)
            order[rank, number, n_rows] = row
            if n_rows + 1 < per_rank:
                heapq.heappush(ranks, (n_tokens + lengths[row], n_rows + 1, rank))
    return Layout(order.reshape(-1), per_rank * n_ranks, len(mini_batches), n_ranks)
