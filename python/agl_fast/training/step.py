"""One PPO step on a batch of rows: a function of the batch and the workers, of no trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from verl import DataProto

import agl_fast
from agl_fast.training import worker_groups as work
from agl_fast.training.advantages import estimate
from agl_fast.training.audit import audit, bent_tokens
from agl_fast.training.audit_scope import scope_of
from agl_fast.training.estimators import require_supported
from agl_fast.training.losses.policy_losses import aggregation_of
from agl_fast.training.losses.policy_losses import require_supported as require_supported_loss
from agl_fast.training.minibatches import Dealer, RowUnits, zero_advantage_groups
from agl_fast.training.policy_audit import PolicyAudit
from agl_fast.training.rollout_correction import bypasses, correct
from agl_fast.training.rollout_correction import (
    require_supported as require_supported_correction,
)
from agl_fast.training.step_metrics import (
    configured_widths,
    data_metrics,
    in_all_rows,
    rollout_metrics,
    row_limits,
    total_limit,
)
from agl_fast.training.timing import timed
from agl_fast.training.trained_tokens import on_trained
from agl_fast.training.tree_checks import holds_trees, require_tree_workers
from agl_fast.training.worker_groups import Rows, WorkerGroups

_UPDATED_KEYS = (
    "old_log_probs",
    "ref_log_prob",
    "values",
    "advantages",
    "returns",
    "rollout_is_weights",
    "response_mask",  # rollout correction may reject tokens
)


@dataclass(frozen=True)
class PpoStep:
    """What a step reports.

    Attributes:
        metrics: verl's `actor/*`, `critic/*`, `perf/*` and data metrics, and `training/*`.
        rows: those that were trained, with what was computed for them.
        seconds: by part of the step.
        empty: why there was nothing to train on; None: there was something.
    """

    metrics: dict[str, float]
    rows: DataProto
    seconds: dict[str, float] = field(default_factory=dict)
    empty: agl_fast.EmptyBatchError | None = None


def check_config(config: Any) -> None:
    """Raise ValueError for settings that this step would get wrong."""
    require_supported(config)
    require_supported_correction(config.algorithm)
    require_supported_loss(config.actor_rollout_ref.actor)


def ppo_step(
    batch: agl_fast.Batch,
    workers: WorkerGroups,
    config: Any,
    *,
    n_rollouts: int,
    global_step: int,
    kl_controller: Any = None,
    update_actor: bool = True,
    policy_audit: PolicyAudit | None = None,
) -> PpoStep:
    """Log-probs, advantages, critic and actor update.

    Rows marked in `is_drop_mask` leave first; their rollouts still count in their groups. A
    mini-batch is `ppo_mini_batch_size × rollout.n` rollouts with all their rows, so that the number
    of optimiser steps follows from `n_rollouts`, not from how many rows they became. What is
    minimised averages over tokens, calls or rollouts (docs/algorithm.md), never over rows.

    Args:
        config: the whole configuration, resolved.
        n_rollouts: that were enqueued for this step, including those that gave no row.
        global_step: seeds the shuffling of rollouts (`actor.shuffle`).
        kl_controller: verl's, where `algorithm.use_kl_in_reward` is set.
        update_actor: False while the critic warms up.
        policy_audit: of the run, which compares this step with earlier ones; None: on its own.

    Raises:
        PolicyMismatchError: the servers sample with other weights than the actor's.
        RuntimeError: rows are trees, and workers cannot train those.
    """
    seconds: dict[str, float] = {}
    metrics: dict[str, float] = {}
    kept = ~batch.tensors["is_drop_mask"].bool()
    metrics["training/n_triplets_prompt_too_long"] = int((~kept).sum())
    metrics["training/n_triplets_dropped_remainder"] = 0
    tensors = {name: values[kept] for name, values in batch.tensors.items()}
    columns = {name: values[kept.numpy()] for name, values in batch.columns.items()}
    if not kept.any():
        why = f"step {global_step}: all {len(batch)} rows are dropped; {batch.accounting}"
        empty = agl_fast.EmptyBatchError(why, batch.accounting)
        return _without_update(tensors, columns, metrics, seconds, empty)

    if holds_trees(tensors):
        require_tree_workers(workers)
    laid_out_rows = Rows(tensors, {"temperature": config.actor_rollout_ref.rollout.temperature})
    tensors["sampled"] = tensors["response_mask"]  # which rollout correction may change
    rollout_ids = [rollout.rollout_id for rollout in batch.rollouts]
    metrics |= _infer(
        tensors,
        columns,
        rollout_ids,
        laid_out_rows,
        workers,
        config,
        seconds,
        policy_audit or PolicyAudit(scope_of(config)),
    )
    with timed("adv", seconds):
        rows = DataProto.from_dict(tensors=tensors, non_tensors=columns)
        rows, adv_metrics = _estimate(rows, batch.rollouts, config, kl_controller)
        metrics |= adv_metrics
    tensors = dict(rows.batch.items())
    if not tensors["response_mask"].any():
        why = f"step {global_step}: algorithm.rollout_correction rejects every token"
        empty = agl_fast.EmptyBatchError(f"{why}; {batch.accounting}", batch.accounting)
        return _without_update(tensors, columns, metrics, seconds, empty)
    laid_out_rows.add({key: tensors[key] for key in _UPDATED_KEYS if key in tensors})

    units = RowUnits.of(rollout_ids, columns, tensors, laid_out_rows.lengths)
    dealer = Dealer(units, n_rollouts, config)
    zero_groups = zero_advantage_groups(units, tensors["advantages"])
    updated = dealer.keep_to_limit(zero_groups, global_step)
    rows = rows.select_idxs(updated)
    metrics["training/n_zero_advantage_groups"] = len(zero_groups)
    metrics["training/n_rollouts_over_update_limit"] = len(
        set(columns["rollout_id_list"]) - set(rows.non_tensor_batch["rollout_id_list"])
    )
    metrics["training/tokens/over_update_limit"] = int(tensors["response_mask"][~updated].sum())
    for suffix, counted in (
        ("_before_processing", _before_processing(batch, kept, tensors)),
        ("_after_processing", rows.batch),
    ):
        metrics |= data_metrics(
            counted,
            row_limits(config),
            use_critic=workers.critic is not None,
            suffix=suffix,
            total=total_limit(config),
        )
    metrics |= rollout_metrics(tensors, columns, batch.rollouts)
    work.set_objectives(workers, config)
    if workers.critic is not None:
        metrics |= _update_critic(laid_out_rows, dealer, workers, config, global_step, seconds)
    if update_actor:
        metrics |= _update_actor(laid_out_rows, dealer, workers, config, global_step, seconds)
    rows.meta_info["global_token_num"] = rows.batch["attention_mask"].sum(dim=1).tolist()
    return PpoStep(metrics, rows, seconds)


def step_without_rows(empty: agl_fast.EmptyBatchError) -> PpoStep:
    """What a step reports that has no batch."""
    columns = {"responses": 1, "attention_mask": 2}
    tensors = {name: torch.zeros(0, width, dtype=torch.int64) for name, width in columns.items()}
    return _without_update(tensors, {}, {}, {}, empty)


def _without_update(
    tensors: Mapping[str, torch.Tensor],
    columns: Mapping[str, Any],
    metrics: dict[str, float],
    seconds: dict[str, float],
    empty: agl_fast.EmptyBatchError,
) -> PpoStep:
    rows = DataProto.from_dict(tensors=tensors, non_tensors=columns)
    rows.meta_info["global_token_num"] = tensors["attention_mask"].sum(dim=1).tolist() or [0]
    return PpoStep(metrics | {"training/n_mini_batches": 0}, rows, seconds, empty)


def _update_critic(
    rows: Rows,
    dealer: Dealer,
    workers: WorkerGroups,
    config: Any,
    global_step: int,
    seconds: dict[str, float],
) -> dict[str, float]:
    critic = config.critic
    mini_batches, layout = dealer.deal(critic, workers.n_critic_ranks, global_step, fixed=False)
    scale = _scale_factor(critic, config)
    rows.add({"loss_weights": dealer.units.weights(critic.loss_agg_mode, mini_batches, scale)})
    with timed("update_critic", seconds):
        return work.update_critic(rows, layout, workers, config)


def _update_actor(
    rows: Rows,
    dealer: Dealer,
    workers: WorkerGroups,
    config: Any,
    global_step: int,
    seconds: dict[str, float],
) -> dict[str, float]:
    actor = config.actor_rollout_ref.actor
    mini_batches, layout = dealer.deal(actor, workers.n_actor_ranks, global_step, fixed=True)
    scale = _scale_factor(actor, config)
    rows.add({"loss_weights": dealer.units.weights(aggregation_of(actor), mini_batches, scale)})
    with timed("update_actor", seconds):
        metrics = work.update_actor(rows, layout, workers, config)
    metrics["training/n_mini_batches"] = layout.n_mini_batches
    metrics["training/n_filler_rows"] = layout.n_fillers
    return metrics


def _scale_factor(part: Any, config: Any) -> float:
    """What seq-mean-token-sum-norm divides by: R as configured, never a trimmed batch's."""
    configured = part.get("loss_scale_factor")
    return float(configured_widths(config)[1] if configured is None else configured)


def _infer(
    tensors: dict[str, torch.Tensor],
    columns: Mapping[str, Any],
    rollout_ids: list[str],
    rows: Rows,
    workers: WorkerGroups,
    config: Any,
    seconds: dict[str, float],
    policy_audit: PolicyAudit,
) -> dict[str, float]:
    """Add old_log_probs, ref_log_prob and values to `tensors`."""
    metrics: dict[str, float] = {}
    if bypasses(tensors, columns, config):
        tensors["old_log_probs"] = on_trained(
            tensors["rollout_log_probs"], tensors["response_mask"]
        )
    else:
        metrics |= _infer_policy(
            tensors, columns, rollout_ids, rows, workers, config, seconds, policy_audit
        )
    if workers.reference is not None:
        with timed("ref", seconds):
            tensors |= _of_trained(work.reference_log_probs(rows, workers, config), tensors)
    if workers.critic is not None:
        with timed("values", seconds):
            tensors |= _of_trained(work.critic_values(rows, workers), tensors)
    return metrics


def _of_trained(
    found: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What workers say of other tokens, such as an observation's NaN, is of no use."""
    mask = tensors["response_mask"]
    return {name: on_trained(values, mask) for name, values in found.items()}


def _infer_policy(
    tensors: dict[str, torch.Tensor],
    columns: Mapping[str, Any],
    rollout_ids: list[str],
    rows: Rows,
    workers: WorkerGroups,
    config: Any,
    seconds: dict[str, float],
    policy_audit: PolicyAudit,
) -> dict[str, float]:
    """Add old_log_probs to `tensors`, and audit them."""
    actor = config.actor_rollout_ref.actor
    with timed("old_log_prob", seconds):
        policy, mfu = work.policy_log_probs(rows, workers, config)
    policy = _of_trained(policy, tensors)
    units = RowUnits.of(rollout_ids, columns, tensors, rows.lengths)
    entropys = policy.pop("entropys")
    weights = units.weights(
        aggregation_of(actor), [np.arange(len(rows))], _scale_factor(actor, config)
    )
    entropy = (entropys * weights).sum()
    metrics = {
        "actor/entropy": float(entropy),
        "actor/entropy_loss": float(entropy),  # its name in Agent-lightning 0.3
        "perf/mfu/actor_infer": mfu,
    }
    tensors |= policy
    bent, bent_by = bent_tokens(columns, tensors.get("call_index"))
    found = audit(
        tensors.get("rollout_log_probs"),
        tensors["old_log_probs"],
        tensors["response_mask"],
        torch.from_numpy(np.asarray(columns["has_rollout_log_probs"], dtype=bool)),
        scope=policy_audit.scope,
        bent=bent,
        bent_by=bent_by,
    )
    policy_audit.judge(found)
    return metrics | found.metrics


def _estimate(
    rows: DataProto, rollouts: list[agl_fast.RolloutEntry], config: Any, kl_controller: Any
) -> tuple[DataProto, dict[str, float]]:
    """Add token_level_rewards, advantages and returns, and what correction changes."""
    changed, metrics = correct(dict(rows.batch.items()), rows.non_tensor_batch, config)
    tensors = {**rows.batch, **changed}
    found = estimate(tensors, rows.non_tensor_batch, rollouts, config, kl_controller)
    for name, values in {**changed, **found.tensors}.items():
        rows.batch[name] = values
    return rows, metrics | found.metrics


def _before_processing(
    batch: agl_fast.Batch, kept: torch.Tensor, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """All rows; what the marked ones have not got does not count."""
    before = dict(batch.tensors)
    before["token_level_rewards"] = before["token_level_scores"].clone()
    before["token_level_rewards"][kept] = tensors["token_level_rewards"]
    before["sampled"] = batch.tensors["response_mask"]
    before["response_mask"] = batch.tensors["response_mask"] * kept[:, None]
    return before | in_all_rows(kept, tensors, ("advantages", "returns", "values"))
