"""Advantages: of rollouts against their group, or of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from verl import DataProto
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.ray_trainer import compute_advantage

import agl_fast

# One number a rollout, which all its trained tokens get. verl's function for it is asked with one
# row a rollout, so that into how many rows a rollout fell changes nothing.
OF_ROLLOUTS = frozenset(
    {
        "gpg",
        "grpo",
        "grpo_passk",
        "grpo_vectorized",
        "opo",
        "reinforce_plus_plus_baseline",
        "rloo",
        "rloo_vectorized",
    }
)
# These look at how many tokens a rollout has.
_BY_LENGTH = frozenset({"opo", "reinforce_plus_plus_baseline"})
# The same numbers, but the vectorized ones round to float32 on the way.
_COMPUTED_AS = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}

REFUSED = {
    "gdpo": "it needs several rewards a rollout, agents give one",
    "optimal_token_baseline": "it weighs rows against each other, not rollouts",
    "remax": "it needs a greedy rollout of every sample besides the sampled ones",
    "tir_optimal_token_baseline": "it weighs rows against each other, not rollouts",
}


def require_supported(estimator: str) -> None:
    """Raise ValueError for an `algorithm.adv_estimator` that would be computed wrongly."""
    if estimator in REFUSED:
        raise ValueError(
            f"algorithm.adv_estimator={estimator!r}: {REFUSED[estimator]}; expected gae, "
            f"reinforce_plus_plus or one of {', '.join(sorted(OF_ROLLOUTS))}"
        )


def rollout_advantages(
    rollouts: Sequence[agl_fast.RolloutEntry],
    algorithm: Mapping[str, Any],
    penalties: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """What an estimator of `OF_ROLLOUTS` gives each rollout.

    Every rollout counts in its group (same data_id) with its reward, whether or not it has rows
    left to train. Where a group has fewer than two, there is nothing to compare with: 0.

    Args:
        algorithm: verl's `algorithm` group of the configuration.
        penalties: by rollout_id, taken off its reward (`use_kl_in_reward`).

    Returns:
        The advantage by rollout_id.
    """
    estimator = str(algorithm["adv_estimator"])
    estimator = _COMPUTED_AS.get(estimator, estimator)
    advantages = {rollout.rollout_id: 0.0 for rollout in rollouts}
    size = Counter(rollout.data_id for rollout in rollouts)
    compared = [rollout for rollout in rollouts if size[rollout.data_id] > 1]
    n_tokens = [1] * len(compared)
    if estimator in _BY_LENGTH:
        n_tokens = [rollout.accounting.trained for rollout in compared]
        if sum(n_tokens) < 2:
            return advantages
    if not compared:
        return advantages

    # float64, as verl divides by the group's spread: rounding must not make one of equal rewards.
    scores = torch.zeros(len(compared), max(n_tokens), dtype=torch.float64)
    taken_off = penalties or {}
    scores[:, 0] = torch.tensor(
        [rollout.reward - taken_off.get(rollout.rollout_id, 0.0) for rollout in compared]
    )
    mask = (torch.arange(max(n_tokens)) < torch.tensor(n_tokens)[:, None]).to(torch.float64)
    options: dict[str, Any] = {}
    if estimator == "grpo":
        options["norm_adv_by_std_in_grpo"] = algorithm.get("norm_adv_by_std_in_grpo", True)
    estimated, _ = get_adv_estimator_fn(estimator)(
        token_level_rewards=scores,
        response_mask=mask,
        index=np.array([rollout.data_id for rollout in compared], dtype=object),
        config=algorithm,
        **options,
    )
    for rollout, advantage in zip(compared, estimated[:, 0].tolist(), strict=True):
        advantages[rollout.rollout_id] = advantage
    return advantages


def spread(
    advantages: Mapping[str, float], rollout_of_row: Sequence[str], response_mask: torch.Tensor
) -> torch.Tensor:
    """(B, R) float32: on every trained token the advantage of the row's rollout, 0 elsewhere."""
    per_row = [advantages[rollout_id] for rollout_id in rollout_of_row]
    return torch.tensor(per_row, dtype=torch.float32)[:, None] * response_mask


def row_advantages(rows: DataProto, algorithm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """verl's estimate from rows, for estimators that compare no rollouts.

    Args:
        rows: with response_mask, token_level_rewards and, for `gae`, values, all (B, R); uid is
            taken from its data_id_list.

    Returns:
        Advantages and returns, (B, R) float32.
    """
    rows.non_tensor_batch["uid"] = rows.non_tensor_batch["data_id_list"]
    rows = compute_advantage(
        rows,
        adv_estimator=algorithm.adv_estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        config=algorithm,
    )
    return rows.batch["advantages"], rows.batch["returns"]
