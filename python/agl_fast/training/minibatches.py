"""Mini-batches of whole rollouts: their rows, loss weights, and layout over data-parallel ranks."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf

from agl_fast.training.losses.units import Aggregation, token_weights
from agl_fast.training.step_rows import Rows

RowIndices = NDArray[np.int64]

# In a layout: a zero-weight padding row.
PADDING = -1
# Advantages up to here are rounding errors of equal rewards.
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows in the order of verl's workers: [rank][mini-batch][row].

    verl gives every data-parallel rank an equal slice of the batch and cuts each slice into equal
    mini-batches. So every mini-batch needs the same number of rows on every rank.

    Attributes:
        order: row indices and `PADDING`; no row occurs twice.
        mini_batch_size: rows of a mini-batch on all ranks, padding rows included.
        n_mini_batches: mini-batches per epoch.
        n_ranks: data-parallel ranks.
    """

    order: RowIndices
    mini_batch_size: int
    n_mini_batches: int
    n_ranks: int

    @property
    def n_padding_rows(self) -> int:
        return int((self.order == PADDING).sum())

    def by_mini_batch(self) -> list[RowIndices]:
        """The rows of each mini-batch, without padding rows, rank after rank."""
        slots = self.order.reshape(self.n_ranks, self.n_mini_batches, -1)
        return [slot[slot != PADDING] for slot in (slots[:, i] for i in range(self.n_mini_batches))]


def count_mini_batches(n_rollouts: int, rollouts_per_mini_batch: int) -> int:
    """Optimizer steps of one epoch. The number of rows has no influence."""
    return -(-n_rollouts // rollouts_per_mini_batch)


def whole_rollouts(
    rollout_of_row: Sequence[Hashable],
    n_mini_batches: int,
    *,
    order: Iterable[Hashable] | None = None,
    seed: int | None = None,
) -> list[RowIndices]:
    """Split the rollouts into mini-batches; all rows of a rollout go to the same one.

    Args:
        rollout_of_row: (B,) rollout ids.
        n_mini_batches: upper limit; there are never more mini-batches than rollouts. Their
            numbers of rollouts differ by at most one.
        order: ids of the rollouts to split; those without rows are skipped. None: all rollouts, in
            the order of their rows.
        seed: shuffle the rollouts; None: keep the order, so that groups stay together.

    Returns:
        The row indices of each mini-batch.
    """
    rows: dict[Hashable, list[int]] = {}
    for row, rollout in enumerate(rollout_of_row):
        rows.setdefault(rollout, []).append(row)
    rollouts = [rollout for rollout in (rows if order is None else order) if rollout in rows]
    if seed is not None:
        np.random.default_rng(seed).shuffle(rollouts)
    shares = np.array_split(np.arange(len(rollouts)), min(n_mini_batches, len(rollouts)))
    return [
        np.array([row for i in share for row in rows[rollouts[i]]], dtype=np.int64)
        for share in shares
    ]


def lay_out(
    mini_batches: Sequence[RowIndices], lengths: Sequence[int], *, n_ranks: int, multiple: int = 1
) -> Layout:
    """Give every rank a share of every mini-batch, filled up with padding rows.

    Within a mini-batch the ranks get the same number of rows and nearly the same number of tokens:
    the longest remaining row goes to the rank with the fewest tokens.

    Args:
        lengths: (B,) tokens of each row.
        multiple: a rank's rows of a mini-batch are a multiple of this number, as micro-batches of
            a fixed size require.
    """
    longest = max(len(mini_batch) for mini_batch in mini_batches)
    per_rank = -(-longest // (n_ranks * multiple)) * multiple
    order = np.full((n_ranks, len(mini_batches), per_rank), PADDING, dtype=np.int64)
    for number, mini_batch in enumerate(mini_batches):
        ranks = [(0, 0, rank) for rank in range(n_ranks)]  # tokens, rows, rank
        for row in sorted(mini_batch.tolist(), key=lambda row: -lengths[row]):
            n_tokens, n_rows, rank = heapq.heappop(ranks)
            order[rank, number, n_rows] = row
            if n_rows + 1 < per_rank:
                heapq.heappush(ranks, (n_tokens + lengths[row], n_rows + 1, rank))
    return Layout(order.reshape(-1), per_rank * n_ranks, len(mini_batches), n_ranks)


def loss_weights(
    rows: Rows, aggregation: Aggregation, mini_batches: Sequence[RowIndices], scale_factor: float
) -> torch.Tensor:
    """(B, R) float32: the weight of each token in the loss of its mini-batch."""
    weights = token_weights(
        aggregation,
        rows.response_mask,
        mini_batches,
        call_index=rows.call_index,
        rollout_of_row=rows.rollout_of_row,
        scale_factor=scale_factor,
    )
    return weights.float()


def zero_advantage_groups(rows: Rows) -> set[str]:
    """Groups in which every advantage is 0, because all rewards are equal."""
    largest = rows.on_trained(rows.tensors["advantages"]).abs().amax(dim=1).tolist()
    groups = rows.group_of_row
    nonzero = {group for group, value in zip(groups, largest, strict=True) if value > ROUNDING}
    return set(groups) - nonzero


def _sample_rollouts(
    rollouts: Sequence[str], rows: Rows, zero_groups: set[str], limit: int, *, seed: int
) -> list[str]:
    """At most `limit` of the rollouts that have rows, at random, in their order.

    Rollouts of `zero_groups` are left out first: only KL and entropy terms learn from them.
    """
    group = dict(zip(rows.rollout_of_row, rows.group_of_row, strict=True))
    with_rows = [rollout for rollout in rollouts if rollout in group]
    rank = np.random.default_rng(seed).permutation(len(with_rows))
    by_rank = sorted(
        range(len(with_rows)), key=lambda i: (group[with_rows[i]] in zero_groups, rank[i])
    )
    return [with_rows[i] for i in sorted(by_rank[:limit])]


class MiniBatches:
    """Splits the rollouts of a step into mini-batches, by the settings of actor or critic.

    Args:
        n_rollouts: rollouts enqueued for the step; determines the number of mini-batches.
        config: the whole configuration.
    """

    def __init__(self, rows: Rows, n_rollouts: int, config: DictConfig) -> None:
        self._rows = rows
        self._n_rollouts = n_rollouts
        self._config = config
        ids = (rollout.rollout_id for rollout in rows.rollouts)
        self._all_rollouts = list(dict.fromkeys([*ids, *rows.rollout_of_row]))
        self._rollouts = self._all_rollouts

    def rollouts_per_mini_batch(self, part: DictConfig) -> int:
        """Of a full one, for the settings of actor or critic."""
        return int(part.ppo_mini_batch_size * self._config.actor_rollout_ref.rollout.n)

    def apply_update_limit(self, zero_groups: set[str], global_step: int) -> torch.Tensor:
        """Leave out rollouts beyond `agentlightning.max_ppo_update_times` mini-batches.

        Returns:
            (B,) bool, True on the rows of the remaining rollouts.
        """
        actor = self._config.actor_rollout_ref.actor
        limit = self._limit()
        if limit is not None:
            self._rollouts = _sample_rollouts(
                self._all_rollouts,
                self._rows,
                zero_groups,
                limit * self.rollouts_per_mini_batch(actor),
                seed=actor.data_loader_seed + global_step,
            )
        kept = set(self._rollouts)
        return torch.tensor([rollout in kept for rollout in self._rows.rollout_of_row])

    def split(
        self, part: DictConfig, n_ranks: int, global_step: int, *, fixed: bool
    ) -> tuple[list[RowIndices], Layout]:
        """The rows of each mini-batch, and their layout.

        Args:
            part: the settings of actor or critic.
            fixed: without `use_dynamic_bsz`, micro-batches have a fixed size.
        """
        n_mini_batches = count_mini_batches(self._n_rollouts, self.rollouts_per_mini_batch(part))
        limit = self._limit()
        mini_batches = whole_rollouts(
            self._rows.rollout_of_row,
            n_mini_batches if limit is None else min(n_mini_batches, limit),
            order=self._rollouts,
            seed=part.data_loader_seed + global_step if part.shuffle else None,
        )
        multiple = 1
        if fixed and not part.use_dynamic_bsz:
            multiple = part.ppo_micro_batch_size_per_gpu
        layout = lay_out(mini_batches, self._rows.lengths, n_ranks=n_ranks, multiple=multiple)
        return mini_batches, layout

    def _limit(self) -> int | None:
        limit: int | None = OmegaConf.select(self._config, "agentlightning.max_ppo_update_times")
        return limit
