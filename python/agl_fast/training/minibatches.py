"""Which rollouts a step updates on, in which mini-batch, and what each token weighs there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from agl_fast.training.losses.units import Aggregation, token_weights
from agl_fast.training.row_balance import (
    Layout,
    Positions,
    count_mini_batches,
    lay_out,
    whole_rollouts,
)
from agl_fast.training.trained_tokens import on_trained

# Advantages that rounding alone made of equal rewards.
ROUNDING = 1e-6


@dataclass(frozen=True)
class RowUnits:
    """Whose tokens stand where: B rows of R response tokens.

    Attributes:
        rollouts: ids of all rollouts of the step, in the order in which they are dealt out.
        rollout_of_row, group_of_row: (B,) ids.
        lengths: (B,) tokens of each row.
        trained: (B, R), not 0 on trained tokens.
        call_index: (B, R) the call that sampled each; None where nobody said.
    """

    rollouts: Sequence[str]
    rollout_of_row: Sequence[str]
    group_of_row: Sequence[str]
    lengths: Sequence[int]
    trained: torch.Tensor
    call_index: torch.Tensor | None

    @classmethod
    def of(
        cls,
        rollouts: Sequence[str],
        columns: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        lengths: Sequence[int],
    ) -> RowUnits:
        """Read from a batch's columns and tensors."""
        of_row = columns["rollout_id_list"].tolist()
        call_index = tensors.get("call_index")
        if call_index is None and "turn_index_list" in columns:  # a row is a call
            turns = torch.from_numpy(np.asarray(columns["turn_index_list"], dtype=np.int64))
            call_index = turns[:, None].expand_as(tensors["response_mask"])
        return cls(
            rollouts=list(dict.fromkeys([*rollouts, *of_row])),
            rollout_of_row=of_row,
            group_of_row=columns["data_id_list"].tolist(),
            lengths=lengths,
            trained=tensors["response_mask"],
            call_index=call_index,
        )

    def weights(
        self,
        aggregation: Aggregation,
        mini_batches: Sequence[Positions],
        scale_factor: float,
    ) -> torch.Tensor:
        """(B, R) float32: what each token counts in its mini-batch."""
        weights = token_weights(
            aggregation,
            self.trained,
            mini_batches,
            call_index=self.call_index,
            rollout_of_row=self.rollout_of_row,
            scale_factor=scale_factor,
        )
        return weights.float()


def zero_advantage_groups(units: RowUnits, advantages: torch.Tensor) -> set[str]:
    """Groups none of whose trained tokens has an advantage, as where all rewards are equal."""
    largest = on_trained(advantages, units.trained).abs().amax(dim=1).tolist()
    moved = {
        group
        for group, at_most in zip(units.group_of_row, largest, strict=True)
        if at_most > ROUNDING
    }
    return set(units.group_of_row) - moved


def limited(units: RowUnits, zero_groups: set[str], at_most: int, *, seed: int) -> list[str]:
    """Leave out whole rollouts until `at_most` with rows are left, chosen at random.

    Those of `zero_groups` go first: they move the policy by KL and entropy terms alone.

    Returns:
        The ids that stay, in their order.
    """
    group = dict(zip(units.rollout_of_row, units.group_of_row, strict=True))
    rollouts = [rollout for rollout in units.rollouts if rollout in group]
    chances = np.random.default_rng(seed).permutation(len(rollouts))
    by_rank = sorted(
        range(len(rollouts)), key=lambda i: (group[rollouts[i]] in zero_groups, chances[i])
    )
    return [rollouts[i] for i in sorted(by_rank[:at_most])]


class Dealer:
    """Deals rollouts out to mini-batches, as the actor's or the critic's settings say.

    Args:
        n_rollouts: that were enqueued for the step: the number of mini-batches follows from it.
        config: the whole configuration.
    """

    def __init__(self, units: RowUnits, n_rollouts: int, config: Any) -> None:
        self.units = units
        self._n_rollouts = n_rollouts
        self._config = config
        self._rollouts = units.rollouts

    def rollouts_per_mini_batch(self, part: Any) -> int:
        """Of a full one, for the actor's or the critic's settings."""
        return int(part.ppo_mini_batch_size * self._config.actor_rollout_ref.rollout.n)

    def keep_to_limit(self, zero_groups: set[str], global_step: int) -> torch.Tensor:
        """Leave out rollouts that `agentlightning.max_ppo_update_times` leaves no room for.

        Returns:
            (B,) bool, True on the rows of those that stay.
        """
        actor = self._config.actor_rollout_ref.actor
        limit = self._limit()
        if limit is not None:
            self._rollouts = limited(
                self.units,
                zero_groups,
                limit * self.rollouts_per_mini_batch(actor),
                seed=actor.data_loader_seed + global_step,
            )
        kept = set(self._rollouts)
        return torch.tensor([rollout in kept for rollout in self.units.rollout_of_row])

    def deal(
        self, part: Any, n_ranks: int, global_step: int, *, fixed: bool
    ) -> tuple[list[Positions], Layout]:
        """The rows of each mini-batch, and where they stand.

        Args:
            part: the actor's or the critic's settings.
            fixed: micro-batches are of a fixed size where `use_dynamic_bsz` is not set.
        """
        n_mini_batches = count_mini_batches(self._n_rollouts, self.rollouts_per_mini_batch(part))
        limit = self._limit()
        mini_batches = whole_rollouts(
            self.units.rollout_of_row,
            n_mini_batches if limit is None else min(n_mini_batches, limit),
            order=self._rollouts,
            seed=part.data_loader_seed + global_step if part.shuffle else None,
        )
        multiple = 1
        if fixed and not part.use_dynamic_bsz:
            multiple = part.ppo_micro_batch_size_per_gpu
        layout = lay_out(mini_batches, self.units.lengths, n_ranks=n_ranks, multiple=multiple)
        return mini_batches, layout

    def _limit(self) -> int | None:
        limit: int | None = OmegaConf.select(self._config, "agentlightning.max_ppo_update_times")
        return limit
