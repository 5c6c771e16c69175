"""Ways to get the objective wrong, each with the objective in which it shows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import ppo_loss

from agl_fast.training import minibatches
from agl_fast.training import worker_groups as work
from agl_fast.training.losses import policy

Patch = pytest.MonkeyPatch


def row_level_statistics(patch: Patch, config: Any) -> None:
    config.algorithm.enable_rollout_level_advantage = False


def verls_loss(patch: Patch, config: Any) -> None:
    """Rows for sequences, and for a divisor how many rows a mini-batch has at level transition."""
    steps = work._steps

    def set_objectives(workers: Any, config: Any) -> None:
        actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        workers.actor.set_loss_fn(partial(ppo_loss, config=actor))

    patch.setattr(work, "set_objectives", set_objectives)
    patch.setattr(work, "_steps", lambda *given: steps(*given) | {"global_batch_size": 10})


def trimmed_scale_factor(patch: Patch, config: Any) -> None:
    weights = minibatches.token_weights

    def by_width(aggregation: Any, trained: torch.Tensor, *rows: Any, **units: Any) -> torch.Tensor:
        units |= {"scale_factor": trained.shape[1]}
        return weights(aggregation, trained, *rows, **units)

    patch.setattr(minibatches, "token_weights", by_width)


def rows_for_calls(patch: Patch, config: Any) -> None:
    """In the denominators."""
    weights = minibatches.token_weights

    def of_rows(aggregation: Any, trained: torch.Tensor, *rows: Any, **units: Any) -> torch.Tensor:
        units |= {"call_index": torch.arange(len(trained))[:, None].expand_as(trained)}
        return weights(aggregation, trained, *rows, **units)

    patch.setattr(minibatches, "token_weights", of_rows)


def rows_for_calls_in_the_ratio(patch: Patch, config: Any) -> None:
    calls = policy.CallsAsRows
    patch.setattr(policy, "CallsAsRows", lambda index, trained: calls(index * 0, trained))


def means_of_micro_batches(patch: Patch, config: Any) -> None:
    compute = policy.PolicyObjective.__call__

    def compute_locally(self: Any, model_output: Any, data: Any) -> Any:
        mask = data["response_mask"].double()
        data["loss_weights"] = mask / mask.sum().clamp(min=1)
        return compute(self, model_output, data)

    patch.setattr(policy.PolicyObjective, "__call__", compute_locally)


def fillers_counted(patch: Patch, config: Any) -> None:
    """A mini-batch is as large as its rows with fillers."""
    update = work.update_actor

    def update_diluted(rows: Any, layout: Any, *further: Any) -> Any:
        n_rows = len(layout.order)
        rows.tensors["loss_weights"] *= (n_rows - layout.n_padding_rows) / n_rows
        return update(rows, layout, *further)

    patch.setattr(work, "update_actor", update_diluted)


def mini_batches_in_the_order_of_rows(patch: Patch, config: Any) -> None:
    split = minibatches.whole_rollouts
    patch.setattr(
        minibatches, "whole_rollouts", lambda of_row, n, order, seed: split(of_row, n, seed=seed)
    )


MUTANTS: dict[str, tuple[Callable[[Patch, Any], None], str, str]] = {
    "row-level statistics": (row_level_statistics, "vanilla", "token-mean"),
    "verl's denominator": (verls_loss, "vanilla", "seq-mean-token-mean"),
    "verl's denominator, gspo": (verls_loss, "gspo", "seq-mean-token-mean"),
    "trimmed R": (trimmed_scale_factor, "vanilla", "seq-mean-token-sum-norm"),
    "rows for calls": (rows_for_calls, "vanilla", "seq-mean-token-mean"),
    "rows for calls in gspo": (rows_for_calls_in_the_ratio, "gspo", "seq-mean-token-mean"),
    "rows for calls in geo_mean": (rows_for_calls_in_the_ratio, "geo_mean", "token-mean"),
    "means of micro-batches": (means_of_micro_batches, "vanilla", "token-mean"),
    "fillers counted": (fillers_counted, "per_rollout_mean", "token-mean"),
    "order of rows": (mini_batches_in_the_order_of_rows, "vanilla", "token-mean"),
}
