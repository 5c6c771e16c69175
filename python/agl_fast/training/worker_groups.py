"""verl's worker groups: rows as the TensorDicts that they take, and what they return for rows.

With the trainer, this is the only module that converts rows to verl's types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from agl_fast.training.losses.policy import PolicyObjective
from agl_fast.training.losses.policy_losses import needs_calls
from agl_fast.training.losses.value import ValueObjective
from agl_fast.training.minibatches import PADDING, Layout, lay_out
from agl_fast.training.step_rows import Rows

FORWARD_KEYS = (
    "prompts",
    "responses",
    "input_ids",
    "attention_mask",
    "position_ids",
    "response_mask",
)
ACTOR_KEYS = (
    "loss_weights",
    "old_log_probs",
    "advantages",
    "ref_log_prob",
    "rollout_is_weights",
)
CRITIC_KEYS = ("loss_weights", "values", "returns")

Tensors = dict[str, torch.Tensor]


class PolicyWorkers(Protocol):
    """verl's worker group of the actor, the reference policy or both.

    Each method takes the rows of all ranks, split over them, without padding. A worker group for
    trees also has `trains_trees() -> list[bool]`, one answer per rank.
    """

    def compute_log_prob(self, rows: TensorDict, /) -> TensorDict: ...

    def compute_ref_log_prob(self, rows: TensorDict, /) -> TensorDict: ...

    def update_actor(self, rows: TensorDict, /) -> TensorDict: ...

    def set_loss_fn(self, loss: Any, /) -> Any: ...


class Future(Protocol):
    """The result of a non-blocking call."""

    def get(self) -> TensorDict: ...


class CriticWorkers(Protocol):
    """verl's worker group of the critic."""

    def infer_batch(self, rows: TensorDict, /) -> Future: ...

    def train_mini_batch(self, rows: TensorDict, /) -> Future: ...

    def set_loss_fn(self, loss: Any, /) -> Any: ...


@dataclass(frozen=True)
class WorkerGroups:
    """verl's worker groups.

    Attributes:
        actor: actor and rollout workers.
        n_actor_ranks: data-parallel size of the actor.
        reference: workers of the reference policy; None if none is needed.
        reference_is_base_of_actor: the reference is the actor without its LoRA adapter.
        critic: None without a critic.
        n_critic_ranks: data-parallel size of the critic.
    """

    actor: PolicyWorkers
    n_actor_ranks: int
    reference: PolicyWorkers | None = None
    reference_is_base_of_actor: bool = False
    critic: CriticWorkers | None = None
    n_critic_ranks: int = 1


def require_tree_workers(workers: WorkerGroups) -> None:
    """Check that every worker group has agl_fast's engine for trees.

    Raises:
        RuntimeError: a group has another engine. verl's own engines would accept the rows and
            compute wrong attention.
    """
    groups = {
        "actor": workers.actor,
        "reference": workers.reference,
        "critic": workers.critic,
    }
    for name, group in groups.items():
        if group is None:
            continue
        ask = getattr(group, "trains_trees", None)
        answers = [False] if ask is None else ask()
        if not all(answers):
            raise RuntimeError(
                f"rows are prefix trees, and the workers of the {name} have another engine than "
                "agl_fast's for trees: expected workers of agl_fast.tree, as VERL starts them "
                "with agentlightning.trace_aggregator.level='tree'"
            )


def laid_out_rows(rows: Rows, layout: Layout, keys: Sequence[str], **meta: Any) -> TensorDict:
    """The rows in the order of a layout, as workers take them: without padding.

    Absent keys are skipped. A padding row has one prompt token and one untrained response token.
    Beside its rows, a rank gets `meta` and the lengths of all rows, since verl counts the floating
    point operations of all ranks.

    Args:
        meta: verl's options, among them `temperature`.
    """
    order = torch.from_numpy(layout.order)
    is_padding = order == PADDING
    tensors = {}
    for key in keys:
        if key in rows.tensors:
            tensors[key] = rows.tensors[key][order]  # PADDING, -1, reads the last row
            tensors[key][is_padding] = 0
    width = tensors["prompts"].shape[1]
    tensors["attention_mask"][is_padding, width - 1 : width + 1] = 1
    tensors["position_ids"][is_padding, ..., width:] = 1
    n_tokens = tensors["attention_mask"].sum(dim=1).tolist()
    non_tensors = {"global_token_num": n_tokens, **meta}
    laid_out = left_right_2_no_padding(tu.get_tensordict(tensors, non_tensors))
    # Indices of all tokens of the batch: every rank would get them whole, and none reads them.
    tu.pop(laid_out, "indices")
    return laid_out


def forward_layout(rows: Rows, n_ranks: int, micro_batch_size: int | None) -> Layout:
    """All rows in one pass.

    Args:
        micro_batch_size: rows; None if verl cuts micro-batches by tokens.
    """
    every_row = [np.arange(len(rows), dtype=np.int64)]
    return lay_out(every_row, rows.lengths, n_ranks=n_ranks, multiple=micro_batch_size or 1)


def policy_log_probs(
    rows: Rows, workers: WorkerGroups, config: DictConfig
) -> tuple[Tensors, float]:
    """The actor's `old_log_probs` and `entropys`, (B, R) float32, and its model FLOPs utilization.

    Args:
        config: the whole configuration; `actor.calculate_sum_pi_squared` adds `sum_pi_squared`.
    """
    layout = forward_layout(rows, workers.n_actor_ranks, _actor_forward_size(config))
    sums_squares = bool(config.actor_rollout_ref.actor.get("calculate_sum_pi_squared", False))
    options = {
        "temperature": _temperature(config),
        "calculate_entropy": True,
        "calculate_sum_pi_squared": sums_squares,
        "compute_loss": False,
    }
    laid_out = laid_out_rows(rows, layout, FORWARD_KEYS, **options)
    output = workers.actor.compute_log_prob(laid_out)
    values = {"old_log_probs": "log_probs", "entropys": "entropy"}
    if sums_squares:
        values["sum_pi_squared"] = "sum_pi_squared"
    mfu = float(tu.get(output, "metrics")["mfu"])
    return _in_rows(output, values, laid_out, layout, len(rows)), mfu


def reference_log_probs(rows: Rows, workers: WorkerGroups, config: DictConfig) -> Tensors:
    """`ref_log_prob` of the reference policy, (B, R) float32."""
    options = {
        "temperature": _temperature(config),
        "calculate_entropy": False,
        "compute_loss": False,
    }
    if workers.reference_is_base_of_actor:
        layout = forward_layout(rows, workers.n_actor_ranks, _actor_forward_size(config))
        laid_out = laid_out_rows(rows, layout, FORWARD_KEYS, no_lora_adapter=True, **options)
        output = workers.actor.compute_log_prob(laid_out)
    else:
        ref = config.actor_rollout_ref.ref
        size = None if ref.log_prob_use_dynamic_bsz else ref.log_prob_micro_batch_size_per_gpu
        layout = forward_layout(rows, workers.n_actor_ranks, size)
        laid_out = laid_out_rows(rows, layout, FORWARD_KEYS, **options)
        assert workers.reference is not None
        output = workers.reference.compute_ref_log_prob(laid_out)
    return _in_rows(output, {"ref_log_prob": "log_probs"}, laid_out, layout, len(rows))


def critic_values(rows: Rows, workers: WorkerGroups, config: DictConfig) -> Tensors:
    """`values` of the critic, (B, R) float32."""
    assert workers.critic is not None
    # verl's critic cuts its micro-batches by tokens and ignores critic.use_dynamic_bsz.
    layout = forward_layout(rows, workers.n_critic_ranks, None)
    options = {"temperature": _temperature(config), "compute_loss": False}
    laid_out = laid_out_rows(rows, layout, FORWARD_KEYS, **options)
    output = workers.critic.infer_batch(laid_out).get()
    return _in_rows(output, {"values": "values"}, laid_out, layout, len(rows))


def set_objectives(workers: WorkerGroups, config: DictConfig) -> None:
    """Replace verl's losses, which average over rows, by agl_fast's objectives on every worker.

    Raises:
        ValueError: a worker has no such policy loss; with Ray, the cause of the raised error.
    """
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    workers.actor.set_loss_fn(PolicyObjective(actor))
    if workers.critic is not None:
        workers.critic.set_loss_fn(ValueObjective(config.critic.cliprange_value))


def update_actor(
    rows: Rows, layout: Layout, workers: WorkerGroups, config: DictConfig
) -> dict[str, float]:
    """One optimizer step per mini-batch and epoch; verl's `actor/*` metrics.

    Args:
        rows: with `loss_weights` of the actor.
    """
    actor = config.actor_rollout_ref.actor
    laid_out = laid_out_rows(
        rows,
        layout,
        (*FORWARD_KEYS, *ACTOR_KEYS, *(("call_index",) if needs_calls(actor) else ())),
        temperature=_temperature(config),
        calculate_entropy=actor.calculate_entropy or actor.entropy_coeff != 0.0,
        distillation_use_topk=False,
        distillation_only=False,
        multi_turn=config.actor_rollout_ref.rollout.multi_turn.enable,
        compute_loss=True,
        **_steps(layout, actor),
    )
    metrics = tu.get(workers.actor.update_actor(laid_out), "metrics")
    return _named(metrics, "actor")


def update_critic(
    rows: Rows, layout: Layout, workers: WorkerGroups, config: DictConfig
) -> dict[str, float]:
    """One optimizer step per mini-batch and epoch; verl's `critic/*` metrics.

    Args:
        rows: with `loss_weights` of the critic.
    """
    assert workers.critic is not None
    keys = (*FORWARD_KEYS, *CRITIC_KEYS)
    options = {"temperature": _temperature(config), **_steps(layout, config.critic)}
    laid_out = laid_out_rows(rows, layout, keys, **options)
    metrics = tu.get(workers.critic.train_mini_batch(laid_out).get(), "metrics")
    return _named(metrics, "critic")


def _temperature(config: DictConfig) -> float:
    return float(config.actor_rollout_ref.rollout.temperature)


def _actor_forward_size(config: DictConfig) -> int | None:
    if config.actor_rollout_ref.actor.use_dynamic_bsz:
        return None
    return int(config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu)


def _steps(layout: Layout, part: DictConfig) -> dict[str, Any]:
    return {
        "mini_batch_size": layout.mini_batch_size,
        "epochs": part.ppo_epochs,
        "seed": part.data_loader_seed,
        "dataloader_kwargs": {"shuffle": False},
    }


def _named(metrics: dict[str, Any], part: str) -> dict[str, float]:
    named = rename_dict(metrics, f"{part}/")
    named[f"perf/mfu/{part}"] = named.pop(f"{part}/mfu")
    return {name: float(value) for name, value in reduce_metrics(named).items()}


def _in_rows(
    output: TensorDict, values: Mapping[str, str], laid_out: TensorDict, layout: Layout, n_rows: int
) -> Tensors:
    """The workers' values, padded, in the order of the rows."""
    is_row = torch.from_numpy(layout.order != PADDING)
    row = torch.from_numpy(layout.order)[is_row]
    in_rows: Tensors = {}
    for name, name_in_output in values.items():
        padded = no_padding_2_padding(tu.get(output, name_in_output), laid_out)
        padded = padded.to(torch.promote_types(padded.dtype, torch.float32))
        in_rows[name] = padded.new_zeros(n_rows, padded.shape[1])
        in_rows[name][row] = padded[is_row]
    return in_rows
