"""One PPO step on a batch of rows: a function of the batch and the workers, without a trainer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from omegaconf import DictConfig

import agl_fast
from agl_fast.training import worker_groups as work
from agl_fast.training.advantages import KlController, estimate
from agl_fast.training.audit import audit, bent_tokens
from agl_fast.training.audit_scope import scope_of
from agl_fast.training.estimators import require_supported
from agl_fast.training.losses.policy_losses import aggregation_of
from agl_fast.training.losses.policy_losses import require_supported as require_supported_loss
from agl_fast.training.minibatches import MiniBatches, loss_weights, zero_advantage_groups
from agl_fast.training.policy_audit import PolicyAudit
from agl_fast.training.rollout_correction import bypasses, correct
from agl_fast.training.rollout_correction import (
    require_supported as require_supported_correction,
)
from agl_fast.training.staleness import staleness_metrics, token_versions
from agl_fast.training.step_metrics import (
    configured_widths,
    data_metrics,
    in_all_rows,
    rollout_metrics,
    row_limits,
    total_limit,
)
from agl_fast.training.step_rows import Rows
from agl_fast.training.worker_groups import WorkerGroups, require_tree_workers


@dataclass(frozen=True)
class PpoStep:
    """The result of a step.

    Attributes:
        metrics: verl's `actor/*`, `critic/*`, `perf/*` and data metrics, and `training/*`.
        rows: the trained rows, with everything that the step computed for them.
        seconds: duration of each part of the step.
        empty: why there was nothing to train; None after an update.
    """

    metrics: dict[str, float]
    rows: Rows
    seconds: dict[str, float] = field(default_factory=dict)
    empty: agl_fast.EmptyBatchError | None = None


@contextmanager
def timed(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Add the duration of the block to ``seconds[name]``."""
    start = time.monotonic()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.monotonic() - start


def check_config(config: DictConfig) -> None:
    """Raise ValueError for settings that this step would compute wrongly."""
    require_supported(config)
    require_supported_correction(config.algorithm)
    require_supported_loss(config.actor_rollout_ref.actor)


def ppo_step(
    batch: agl_fast.Batch,
    workers: WorkerGroups,
    config: DictConfig,
    *,
    n_rollouts: int,
    global_step: int,
    kl_controller: KlController | None = None,
    update_actor: bool = True,
    policy_audit: PolicyAudit | None = None,
    policy_version: int | None = None,
) -> PpoStep:
    """Log-probs, advantages, critic and actor update.

    Dropped rows (`is_drop_mask`) are removed first; their rollouts still count in their groups. A
    mini-batch is `ppo_mini_batch_size × rollout.n` rollouts with all their rows, so the number of
    optimizer steps depends on `n_rollouts` and not on the number of rows. The loss averages over
    tokens, calls or rollouts (docs/algorithm.md), never over rows.

    Args:
        config: the whole configuration, resolved.
        n_rollouts: rollouts enqueued for this step, including those without rows.
        global_step: seeds the shuffling of rollouts (`actor.shuffle`).
        kl_controller: verl's, required with `algorithm.use_kl_in_reward`.
        update_actor: False during the critic's warm-up.
        policy_audit: the run's audit, which compares this step with earlier ones; None: a new one.
        policy_version: of the actor before the update, if rollouts may be stale. The audit then
            compares tokens of this version only. None: nothing is stale.

    Raises:
        PolicyMismatchError: the servers sample with other weights than the actor's.
        RuntimeError: rows are prefix trees, and the workers have no engine for trees.
    """
    seconds: dict[str, float] = {}
    metrics: dict[str, float] = {}
    kept = ~batch.tensors["is_drop_mask"].bool()
    metrics["training/n_triplets_prompt_too_long"] = int((~kept).sum())
    metrics["training/n_triplets_dropped_remainder"] = 0
    rows = Rows.of(batch).select(kept)
    if not len(rows):
        why = f"step {global_step}: all {len(batch)} rows are dropped; {batch.accounting}"
        empty = agl_fast.EmptyBatchError(why, batch.accounting)
        return _without_update(rows, metrics, seconds, empty)

    if rows.has_branches:
        require_tree_workers(workers)
    rows.tensors["sampled"] = rows.response_mask  # rollout correction may change the latter
    audits = policy_audit or PolicyAudit(scope_of(config))
    if policy_version is not None:
        metrics |= staleness_metrics(rows, policy_version)
    metrics |= _infer(rows, workers, config, seconds, audits, policy_version)
    with timed("adv", seconds):
        metrics |= _estimate(rows, config, kl_controller)
    if not rows.response_mask.any():
        why = f"step {global_step}: algorithm.rollout_correction rejects every token"
        empty = agl_fast.EmptyBatchError(f"{why}; {batch.accounting}", batch.accounting)
        return _without_update(rows, metrics, seconds, empty)

    mini_batches = MiniBatches(rows, n_rollouts, config)
    zero_groups = zero_advantage_groups(rows)
    updated = mini_batches.apply_update_limit(zero_groups, global_step)
    trained = rows.select(updated)
    metrics["training/n_zero_advantage_groups"] = len(zero_groups)
    metrics["training/n_rollouts_over_update_limit"] = len(
        set(rows.rollout_of_row) - set(trained.rollout_of_row)
    )
    metrics["training/tokens/over_update_limit"] = int(rows.response_mask[~updated].sum())
    for suffix, tensors in (
        ("_before_processing", _before_processing(batch, kept, rows)),
        ("_after_processing", trained.tensors),
    ):
        metrics |= data_metrics(
            tensors,
            row_limits(config),
            use_critic=workers.critic is not None,
            suffix=suffix,
            total=total_limit(config),
        )
    metrics |= rollout_metrics(rows)
    work.set_objectives(workers, config)
    if workers.critic is not None:
        metrics |= _update_critic(rows, mini_batches, workers, config, global_step, seconds)
    if update_actor:
        metrics |= _update_actor(rows, mini_batches, workers, config, global_step, seconds)
    return PpoStep(metrics, trained, seconds)


def step_without_rows(empty: agl_fast.EmptyBatchError) -> PpoStep:
    """The result of a step whose batch is empty."""
    widths = {"responses": 1, "attention_mask": 2}
    tensors = {name: torch.zeros(0, width, dtype=torch.int64) for name, width in widths.items()}
    return _without_update(Rows(tensors, {}, []), {}, {}, empty)


def _without_update(
    rows: Rows,
    metrics: dict[str, float],
    seconds: dict[str, float],
    empty: agl_fast.EmptyBatchError,
) -> PpoStep:
    return PpoStep(metrics | {"training/n_mini_batches": 0}, rows, seconds, empty)


def _update_critic(
    rows: Rows,
    mini_batches: MiniBatches,
    workers: WorkerGroups,
    config: DictConfig,
    global_step: int,
    seconds: dict[str, float],
) -> dict[str, float]:
    critic = config.critic
    of_step, layout = mini_batches.split(critic, workers.n_critic_ranks, global_step, fixed=False)
    scale = _scale_factor(critic, config)
    rows.tensors["loss_weights"] = loss_weights(rows, critic.loss_agg_mode, of_step, scale)
    with timed("update_critic", seconds):
        return work.update_critic(rows, layout, workers, config)


def _update_actor(
    rows: Rows,
    mini_batches: MiniBatches,
    workers: WorkerGroups,
    config: DictConfig,
    global_step: int,
    seconds: dict[str, float],
) -> dict[str, float]:
    actor = config.actor_rollout_ref.actor
    of_step, layout = mini_batches.split(actor, workers.n_actor_ranks, global_step, fixed=True)
    scale = _scale_factor(actor, config)
    rows.tensors["loss_weights"] = loss_weights(rows, aggregation_of(actor), of_step, scale)
    with timed("update_actor", seconds):
        metrics = work.update_actor(rows, layout, workers, config)
    metrics["training/n_mini_batches"] = layout.n_mini_batches
    metrics["training/n_filler_rows"] = layout.n_padding_rows
    return metrics


def _scale_factor(part: DictConfig, config: DictConfig) -> float:
    """Divisor of seq-mean-token-sum-norm: R as configured, also for a trimmed batch."""
    configured = part.get("loss_scale_factor")
    return float(configured_widths(config)[1] if configured is None else configured)


def _infer(
    rows: Rows,
    workers: WorkerGroups,
    config: DictConfig,
    seconds: dict[str, float],
    policy_audit: PolicyAudit,
    policy_version: int | None,
) -> dict[str, float]:
    """Add old_log_probs, ref_log_prob and values to the rows."""
    metrics: dict[str, float] = {}
    if bypasses(rows, config):
        rows.tensors["old_log_probs"] = rows.on_trained(rows.tensors["rollout_log_probs"])
    else:
        metrics |= _infer_policy(rows, workers, config, seconds, policy_audit, policy_version)
    if workers.reference is not None:
        with timed("ref", seconds):
            _add_trained(rows, work.reference_log_probs(rows, workers, config))
    if workers.critic is not None:
        with timed("values", seconds):
            _add_trained(rows, work.critic_values(rows, workers, config))
    return metrics


def _add_trained(rows: Rows, values: Mapping[str, torch.Tensor]) -> None:
    """Add workers' values of trained tokens; those of context tokens may be NaN."""
    rows.tensors |= {name: rows.on_trained(each) for name, each in values.items()}


def _infer_policy(
    rows: Rows,
    workers: WorkerGroups,
    config: DictConfig,
    seconds: dict[str, float],
    policy_audit: PolicyAudit,
    policy_version: int | None,
) -> dict[str, float]:
    """Add old_log_probs to the rows, and audit them."""
    actor = config.actor_rollout_ref.actor
    with timed("old_log_prob", seconds):
        policy, mfu = work.policy_log_probs(rows, workers, config)
    entropys = rows.on_trained(policy.pop("entropys"))
    one_mini_batch = [np.arange(len(rows))]
    weights = loss_weights(
        rows, aggregation_of(actor), one_mini_batch, _scale_factor(actor, config)
    )
    entropy = float((entropys * weights).sum())
    metrics = {
        "actor/entropy": entropy,
        "actor/entropy_loss": entropy,  # its name in Agent-lightning 0.3
        "perf/mfu/actor_infer": mfu,
    }
    _add_trained(rows, policy)
    bent, bent_by = bent_tokens(rows.columns, rows.call_index)
    is_current = None
    if policy_version is not None and (versions := token_versions(rows)) is not None:
        is_current = versions.eq(policy_version)
    comparison = audit(
        rows.tensors.get("rollout_log_probs"),
        rows.tensors["old_log_probs"],
        rows.response_mask,
        torch.from_numpy(np.asarray(rows.columns["has_rollout_log_probs"], dtype=bool)),
        scope=policy_audit.scope,
        bent=bent,
        bent_by=bent_by,
        is_current=is_current,
    )
    policy_audit.judge(comparison)
    return metrics | comparison.metrics


def _estimate(
    rows: Rows, config: DictConfig, kl_controller: KlController | None
) -> dict[str, float]:
    """Add token_level_rewards, advantages and returns, and what rollout correction changes."""
    corrected, metrics = correct(rows, config)
    rows.tensors |= corrected
    estimated = estimate(rows, config, kl_controller)
    rows.tensors |= estimated.tensors
    return metrics | estimated.metrics


def _before_processing(
    batch: agl_fast.Batch, kept: torch.Tensor, rows: Rows
) -> dict[str, torch.Tensor]:
    """The tensors of all rows, with zeros where dropped rows have no values."""
    before = dict(batch.tensors)
    before["token_level_rewards"] = before["token_level_scores"].clone()
    before["token_level_rewards"][kept] = rows.tensors["token_level_rewards"]
    before["sampled"] = batch.tensors["response_mask"]
    before["response_mask"] = batch.tensors["response_mask"] * kept[:, None]
    return before | in_all_rows(kept, rows.tensors, ("advantages", "returns", "values"))
