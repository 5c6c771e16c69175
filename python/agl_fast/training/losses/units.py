"""Loss units: the objective averages over tokens, calls or rollouts, never over rows.

An objective is a weighted sum over the trained tokens of a mini-batch. The weights contain units
and denominators, so workers only sum, and the split into rows, micro-batches and ranks does not
change the result.
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
    """The weight of each token in the objective of its mini-batch.

    Args:
        trained: (B, R), nonzero on trained tokens.
        mini_batches: row indices of each mini-batch.
        call_index: (B, R) int64 call that sampled each token; required for the aggregations
            `NEEDS_CALLS`.
        rollout_of_row: (B,) rollout of each row.
        scale_factor: divisor of seq-mean-token-sum-norm.

    Returns:
        (B, R) float64, 0 on untrained tokens and on rows outside all mini-batches.

    Raises:
        ValueError: `aggregation` is unknown, or requires a missing call_index.
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
    rollout = torch.tensor([numbers.setdefault(id_, len(numbers)) for id_ in rollout_of_row])
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
    """1 / (number of units × tokens of the token's unit); tokens are in the last dimension."""
    if unit.shape[-1] == 0:
        return torch.zeros(0, dtype=torch.float64)
    units, of_token, n_tokens = torch.unique(unit, dim=-1, return_inverse=True, return_counts=True)
    share: torch.Tensor = 1.0 / (units.shape[-1] * n_tokens[of_token].double())
    return share
