"""The actor's objective, computed by every worker for each micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn, kl_penalty
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import no_padding_2_padding

from agl_fast.training.losses.policy_losses import (
    OF_ROLLOUTS,
    is_of_tokens,
    loss_mode,
    require_registered,
)

Metrics = dict[str, Any]


class PolicyObjective:
    """Σ weight × (policy loss - entropy_coeff × entropy + kl_loss_coef × KL) over trained tokens.

    verl's policy losses average over the rows of a micro-batch. Here they get rows of one token
    each (rows of one call each if a token's loss depends on other tokens), and token weights
    (`units.token_weights`) replace verl's averages.

    Unpickling raises ValueError in a worker without this policy loss.

    Args:
        config: verl's ActorConfig.
    """

    def __init__(self, config: Any) -> None:
        self.config = config

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        require_registered(loss_mode(self.config))

    def __call__(
        self, model_output: Any, data: Any, dp_group: Any = None
    ) -> tuple[torch.Tensor, Metrics]:
        """The micro-batch's part of the objective, times the number of data-parallel ranks.

        Args:
            model_output: nested log_probs of all tokens; nested entropy if requested.
            data: (b, R) each: response_mask, loss_weights, old_log_probs, advantages; if used,
                call_index, ref_log_prob and rollout_is_weights.
        """
        config, n_ranks = self.config, data["dp_size"]
        trained = data["response_mask"] != 0
        n_trained = trained.sum()
        if n_trained == 0:  # padding rows or rejected tokens only, but every rank takes part
            trained[0, 0] = True

        def picked(values: torch.Tensor) -> torch.Tensor:
            of_tokens = values[trained]
            if n_trained == 0:  # zeros with a graph, also for NaN and infinity
                return of_tokens.nan_to_num(0.0, 0.0, 0.0) * 0.0
            return of_tokens

        log_prob = picked(no_padding_2_padding(model_output["log_probs"], data))
        precision = torch.promote_types(log_prob.dtype, torch.float32)  # of sums
        weights = data["loss_weights"][trained].to(precision) * n_ranks
        policy_loss, of_verl = self._policy_loss(log_prob, weights, trained, picked, data)
        # verl's metrics are means over the tokens of this micro-batch.
        share = n_trained * n_ranks / max(data["batch_num_tokens"], 1)
        metrics: Metrics = {name: _summed(value * share) for name, value in of_verl.items()}
        metrics["actor/pg_loss"] = _summed(policy_loss)

        loss = policy_loss
        entropy = model_output.get("entropy")
        if entropy is not None:
            mean = (picked(no_padding_2_padding(entropy, data)) * weights).sum()
            loss = loss - config.entropy_coeff * mean
            metrics["actor/entropy_loss"] = _summed(mean)
        if config.use_kl_loss:
            divergence = kl_penalty(log_prob, picked(data["ref_log_prob"]), config.kl_loss_type)
            mean = (divergence * weights).sum()
            loss = loss + config.kl_loss_coef * mean
            metrics["kl_loss"] = _summed(mean)
            metrics["kl_coef"] = config.kl_loss_coef
        return loss, metrics

    def _policy_loss(
        self,
        log_prob: torch.Tensor,
        weights: torch.Tensor,
        trained: torch.Tensor,
        picked: Callable[[torch.Tensor], torch.Tensor],
        data: Any,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        config, name = self.config, loss_mode(self.config)
        rows = TokensAsRows() if is_of_tokens(name) else CallsAsRows(data["call_index"], trained)
        importance = picked(data["rollout_is_weights"]) if "rollout_is_weights" in data else None
        advantages = rows.place(picked(data["advantages"]))
        if name == "geo_mean":  # a mean over rows, proportional to their advantages
            of_call = rows.place(weights).sum(dim=1, keepdim=True)
            advantages = advantages * of_call * len(of_call)
        else:  # the others multiply every token by its importance weight
            importance = weights if importance is None else weights * importance
        config.global_batch_info.clear()
        # sapo always averages over rows; with rows of one token and this divisor, that is a sum.
        config.global_batch_info.update(dp_size=1, global_batch_size=1)
        compute = get_policy_loss_fn(OF_ROLLOUTS.get(name, name))
        loss, metrics = compute(
            old_log_prob=rows.place(picked(data["old_log_probs"])),
            log_prob=rows.place(log_prob),
            advantages=advantages,
            response_mask=rows.place(torch.ones_like(log_prob, dtype=torch.bool)),
            loss_agg_mode="token-sum",
            config=config,
            rollout_is_weights=None if importance is None else rows.place(importance),
        )
        return loss, metrics


class TokensAsRows:
    """Rows of one token each."""

    def place(self, values: torch.Tensor) -> torch.Tensor:
        """(tokens,) as (tokens, 1)."""
        return values[:, None]


class CallsAsRows:
    """Rows of one call each.

    Args:
        call_index: (b, R) int64.
        trained: (b, R) bool, with at least one token.
    """

    def __init__(self, call_index: torch.Tensor, trained: torch.Tensor) -> None:
        row = trained.nonzero()[:, 0]
        calls, self._call, n_tokens = torch.unique(
            torch.stack([row, call_index[trained]]), dim=1, return_inverse=True, return_counts=True
        )
        in_order = torch.argsort(self._call, stable=True)
        starts = n_tokens.cumsum(0) - n_tokens
        self._place = torch.empty_like(in_order)
        self._place[in_order] = torch.arange(
            len(in_order), device=row.device
        ) - torch.repeat_interleave(starts, n_tokens)
        self._shape = (calls.shape[1], int(n_tokens.max()))

    def place(self, values: torch.Tensor) -> torch.Tensor:
        """(tokens,) as (calls, length of the longest), right-padded with zeros."""
        return values.new_zeros(self._shape).index_put((self._call, self._place), values)


def _summed(value: torch.Tensor | float) -> Metric:
    """A metric summed over micro-batches, scaled for verl's average over ranks."""
    return Metric(AggregationType.SUM, value)
