"""What the objective averages over: tokens, calls or rollouts, never rows.

An objective is a sum over the trained tokens of a mini-batch, each with a weight. The weights say
all about units and denominators, so that a worker only sums: however a mini-batch is cut into rows,
micro-batches and ranks, the sum is the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

# verl's loss_agg_mode, in which a sequence is a call; "rollout-mean" is the mean over rollouts of
# the mean over a rollout's tokens.
Aggregation = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
    "rollout-mean",
]
NEEDS_CALLS = frozenset({"seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"})


def token_weights(
    aggregation: Aggregation,
    trained: torch.Tensor,
    mini_batches: Sequence[NDArray[np.int64]],
    *,
    call_index: torch.Tensor | None,
    rollout_of_row: Sequence[Hashable],
    scale_factor: float = 1.0,
) -> torch.Tensor:
    """What each token counts in the objective of its mini-batch.

    Args:
        trained: (B, R), not 0 on trained tokens.
        mini_batches: the rows of each.
        call_index: (B, R) int64, which call of its rollout sampled the token. Only where
            `aggregation` is one of `NEEDS_CALLS`.
        rollout_of_row: (B,) whose row it is.
        scale_factor: what seq-mean-token-sum-norm divides by.

    Returns:
        (B, R) float64, 0 on tokens that are not trained and on rows of no mini-batch.

    Raises:
        ValueError: `aggregation` is unknown, or needs a call_index that is not there.
    """
    if aggregation not in get_args(Aggregation):
        expected = ", ".join(get_args(Aggregation))
        raise ValueError(f"loss_agg_mode={aggregation!r}: expected one of {expected}")
    if aggregation in NEEDS_CALLS and call_index is None:
        raise ValueError(
            f"loss_agg_mode={aggregation!r} averages over calls, but the rows do not say which "
            "call sampled a token; build them with call_index=True"
        )
    weights = torch.zeros(trained.shape, dtype=torch.float64)
    numbers: dict[Hashable, int] = {}
    rollout = torch.tensor([numbers.setdefault(each, len(numbers)) for each in rollout_of_row])
    for rows in map(torch.from_numpy, mini_batches):
        row, column = trained[rows].nonzero(as_tuple=True)
        row = rows[row]
        if aggregation == "token-sum":
            of_token = torch.ones(len(row), dtype=torch.float64)
        elif aggregation == "token-mean":
            of_token = torch.full((len(row),), 1.0 / max(len(row), 1), dtype=torch.float64)
        elif aggregation == "rollout-mean":
            of_token = _mean_of_means(rollout[row])
        else:
            assert call_index is not None
            unit = torch.stack([rollout[row], call_index[row, column]])
            of_token = _of_calls(aggregation, unit, scale_factor)
        weights[row, column] = of_token
    return weights


def _of_calls(aggregation: str, unit: torch.Tensor, scale_factor: float) -> torch.Tensor:
    if aggregation == "seq-mean-token-mean":
        return _mean_of_means(unit)
    divisor = float(max(torch.unique(unit, dim=-1).shape[-1], 1))
    if aggregation == "seq-mean-token-sum-norm":
        divisor *= scale_factor
    return torch.full((unit.shape[-1],), 1.0 / divisor, dtype=torch.float64)


def _mean_of_means(unit: torch.Tensor) -> torch.Tensor:
    """1 / (units × tokens of the token's unit), for tokens that stand in the last dimension."""
    if unit.shape[-1] == 0:
        return torch.zeros(0, dtype=torch.float64)
    units, of_token, n_tokens = torch.unique(unit, dim=-1, return_inverse=True, return_counts=True)
    share: torch.Tensor = 1.0 / (units.shape[-1] * n_tokens[of_token].double())
    return share
