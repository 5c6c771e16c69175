"""What verl's worker groups compute for rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from agl_fast.training.losses.policy import PolicyObjective
from agl_fast.training.losses.policy_losses import needs_calls
from agl_fast.training.losses.value import ValueObjective
from agl_fast.training.row_balance import FILLER, Layout, lay_out

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


@dataclass(frozen=True)
class WorkerGroups:
    """verl's worker groups.

    Attributes:
        actor: with the workers of actor and rollout.
        n_actor_ranks: its data-parallel size.
        reference: with the reference policy, None where nothing needs one.
        reference_is_base_of_actor: the reference is the actor without its LoRA adapter.
        critic: None where there is none.
        n_critic_ranks: its data-parallel size.
    """

    actor: Any
    n_actor_ranks: int
    reference: Any = None
    reference_is_base_of_actor: bool = False
    critic: Any = None
    n_critic_ranks: int = 1


class Rows:
    """B rows, and a further one, the filler, that weighs nothing.

    Args:
        tensors: (B, …), with `FORWARD_KEYS`.
        meta: what the workers are told besides, as the temperature.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> None:
        filler = _filler(tensors)
        self._tensors = {key: torch.cat([value, filler[key]]) for key, value in tensors.items()}
        self._meta = dict(meta)

    def __len__(self) -> int:
        return len(self._tensors["responses"]) - 1

    @property
    def lengths(self) -> list[int]:
        """(B,) tokens of each row."""
        n_tokens: list[int] = self._tensors["attention_mask"][:FILLER].sum(dim=1).tolist()
        return n_tokens

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Further values, (B, R) each; the filler has zeros."""
        self._tensors |= {key: _with_zeros(value) for key, value in tensors.items()}

    def select(self, layout: Layout, keys: tuple[str, ...], **meta: Any) -> TensorDict:
        """The laid-out rows as the workers take them, without padding.

        Keys that the rows do not have are left out. Beside its rows, a rank gets the lengths of
        all (verl counts floating point operations of all ranks) and single values.
        """
        order = torch.from_numpy(layout.order)
        tensors = {key: self._tensors[key][order] for key in keys if key in self._tensors}
        n_tokens = tensors["attention_mask"].sum(dim=1).tolist()
        told = {**self._meta, "global_token_num": n_tokens, **meta}
        laid_out = left_right_2_no_padding(tu.get_tensordict(tensors, told))
        # Positions of all tokens of the batch, which every rank would get whole and none reads.
        tu.pop(laid_out, "indices")
        return laid_out

    def lay_out_for_forward(self, n_ranks: int, micro_batch_size: int | None) -> Layout:
        """All rows in one pass.

        Args:
            micro_batch_size: None where verl cuts micro-batches by their tokens.
        """
        every_row = [np.arange(len(self), dtype=np.int64)]
        return lay_out(every_row, self.lengths, n_ranks=n_ranks, multiple=micro_batch_size or 1)


def policy_log_probs(rows: Rows, workers: WorkerGroups, config: Any) -> tuple[Tensors, float]:
    """The actor's `old_log_probs` and `entropys`, (B, R) float32, and its model FLOPs utilisation.

    Args:
        config: the whole configuration. With `actor.calculate_sum_pi_squared` there is
            `sum_pi_squared`, too.
    """
    layout = rows.lay_out_for_forward(workers.n_actor_ranks, _actor_forward_size(config))
    sums_squares = bool(config.actor_rollout_ref.actor.get("calculate_sum_pi_squared", False))
    told = {
        "calculate_entropy": True,
        "calculate_sum_pi_squared": sums_squares,
        "compute_loss": False,
    }
    laid_out = rows.select(layout, FORWARD_KEYS, **told)
    output = workers.actor.compute_log_prob(laid_out)
    values = {"old_log_probs": "log_probs", "entropys": "entropy"}
    if sums_squares:
        values["sum_pi_squared"] = "sum_pi_squared"
    mfu = float(tu.get(output, "metrics")["mfu"])
    return _in_rows(output, values, laid_out, layout, len(rows)), mfu


def reference_log_probs(rows: Rows, workers: WorkerGroups, config: Any) -> Tensors:
    """`ref_log_prob` of the reference policy, (B, R) float32."""
    told = {"calculate_entropy": False, "compute_loss": False}
    if workers.reference_is_base_of_actor:
        layout = rows.lay_out_for_forward(workers.n_actor_ranks, _actor_forward_size(config))
        laid_out = rows.select(layout, FORWARD_KEYS, no_lora_adapter=True, **told)
        output = workers.actor.compute_log_prob(laid_out)
    else:
        ref = config.actor_rollout_ref.ref
        size = None if ref.log_prob_use_dynamic_bsz else ref.log_prob_micro_batch_size_per_gpu
        layout = rows.lay_out_for_forward(workers.n_actor_ranks, size)
        laid_out = rows.select(layout, FORWARD_KEYS, **told)
        output = workers.reference.compute_ref_log_prob(laid_out)
    return _in_rows(output, {"ref_log_prob": "log_probs"}, laid_out, layout, len(rows))


def critic_values(rows: Rows, workers: WorkerGroups) -> Tensors:
    """`values` of the critic, (B, R) float32."""
    # verl's critic cuts its micro-batches by their tokens, whatever critic.use_dynamic_bsz says.
    layout = rows.lay_out_for_forward(workers.n_critic_ranks, None)
    laid_out = rows.select(layout, FORWARD_KEYS, compute_loss=False)
    output = workers.critic.infer_batch(laid_out).get()
    return _in_rows(output, {"values": "values"}, laid_out, layout, len(rows))


def set_objectives(workers: WorkerGroups, config: Any) -> None:
    """Give every worker agl_fast's objective in place of verl's, which averages over rows.

    Raises:
        ValueError: a worker lacks the policy loss; through Ray, as the cause of its error.
    """
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    workers.actor.set_loss_fn(PolicyObjective(actor))
    if workers.critic is not None:
        workers.critic.set_loss_fn(ValueObjective(config.critic.cliprange_value))


def update_actor(
    rows: Rows, layout: Layout, workers: WorkerGroups, config: Any
) -> dict[str, float]:
    """One optimiser step per mini-batch and epoch; verl's `actor/*` metrics.

    Args:
        rows: with `loss_weights` of the actor.
    """
    actor = config.actor_rollout_ref.actor
    laid_out = rows.select(
        layout,
        (*FORWARD_KEYS, *ACTOR_KEYS, *(("call_index",) if needs_calls(actor) else ())),
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
    rows: Rows, layout: Layout, workers: WorkerGroups, config: Any
) -> dict[str, float]:
    """One optimiser step per mini-batch and epoch; verl's `critic/*` metrics.

    Args:
        rows: with `loss_weights` of the critic.
    """
    laid_out = rows.select(layout, (*FORWARD_KEYS, *CRITIC_KEYS), **_steps(layout, config.critic))
    metrics = tu.get(workers.critic.train_mini_batch(laid_out).get(), "metrics")
    return _named(metrics, "critic")


def _actor_forward_size(config: Any) -> int | None:
    if config.actor_rollout_ref.actor.use_dynamic_bsz:
        return None
    return int(config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu)


def _steps(layout: Layout, part: Any) -> dict[str, Any]:
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
    """The workers' values, back in the order of the rows and padded."""
    is_row = torch.from_numpy(layout.order != FILLER)
    row = torch.from_numpy(layout.order)[is_row]
    found: Tensors = {}
    for name, name_in_output in values.items():
        padded = no_padding_2_padding(tu.get(output, name_in_output), laid_out)
        padded = padded.to(torch.promote_types(padded.dtype, torch.float32))
        found[name] = padded.new_zeros(n_rows, padded.shape[1])
        found[name][row] = padded[is_row]
    return found


def _filler(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """One row of one prompt and one response token, of which none is trained."""
    width = tensors["prompts"].shape[1]
    filler = {key: torch.zeros_like(value[:1]) for key, value in tensors.items()}
    filler["attention_mask"][0, width - 1 : width + 1] = 1
    filler["position_ids"][0, width:] = 1
    return filler


def _with_zeros(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows, torch.zeros_like(rows[:1])])
