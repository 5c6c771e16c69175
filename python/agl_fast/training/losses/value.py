"""The critic's objective, as every worker computes it for a micro-batch."""

from __future__ import annotations

from typing import Any

import torch
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import no_padding_2_padding


class ValueObjective:
    """Σ weight × ½ max((v - return)², (v clipped to old v ± reach - return)²).

    Args:
        reach: cliprange_value, how far v may move from its old value before it is clipped.
    """

    def __init__(self, reach: float) -> None:
        self.reach = reach

    def __call__(
        self, model_output: Any, data: Any, dp_group: Any = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """The objective's part of this micro-batch, times the ranks that average gradients.

        Args:
            model_output: nested values of all tokens.
            data: (b, R) each: response_mask, loss_weights, values, returns.
        """
        n_ranks = data["dp_size"]
        trained = data["response_mask"].bool()
        predicted = no_padding_2_padding(model_output["values"], data)[trained]
        before, returns = data["values"][trained], data["returns"][trained]
        weights = data["loss_weights"][trained] * n_ranks
        errors = (predicted - returns).square()
        clipped = (predicted.clamp(before - self.reach, before + self.reach) - returns).square()
        loss = 0.5 * (torch.maximum(errors, clipped) * weights).sum()
        share = n_ranks / max(data["batch_num_tokens"], 1)
        return loss, {
            name: Metric(AggregationType.SUM, value)
            for name, value in {
                "critic/vf_loss": loss,
                "critic/vf_clipfrac": (clipped > errors).sum() * share,
                "critic/vpred_mean": predicted.sum() * share,
            }.items()
        }
