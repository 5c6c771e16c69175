"""The critic's objective, computed by every worker for each micro-batch."""

from __future__ import annotations

from typing import Any

import torch
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import no_padding_2_padding


class ValueObjective:
    """Σ weight × ½ max((v - return)², (v clipped to old v ± clip_range - return)²).

    Args:
        clip_range: `critic.cliprange_value`.
    """

    def __init__(self, clip_range: float) -> None:
        self.clip_range = clip_range

    def __call__(
        self, model_output: Any, data: Any, dp_group: Any = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """The micro-batch's part of the objective, times the number of data-parallel ranks.

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
        clipped = (
            predicted.clamp(before - self.clip_range, before + self.clip_range) - returns
        ).square()
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
