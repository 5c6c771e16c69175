"""Advantages per rollout, then per token, as docs/algorithm.md specifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig
from verl.trainer.ppo.core_algos import kl_penalty
from verl.utils.torch_functional import masked_mean

import agl_fast
from agl_fast.training.estimators import OF_ROLLOUTS, along_sequences, compare, of_rows
from agl_fast.training.step_rows import Rows
from agl_fast.training.trained_tokens import Numbers, Sequences, TrainedTokens

# Values that workers compute for every token of a row, also for untrained ones.
_OF_TOKENS = ("old_log_probs", "ref_log_prob", "values", "sum_pi_squared", "rollout_is_weights")


class KlController(Protocol):
    """verl's controller of the KL penalty in the reward."""

    value: float

    def update(self, *, current_kl: float, n_steps: int) -> None: ...


@dataclass(frozen=True)
class Estimated:
    """Rewards, advantages and returns of a step.

    Attributes:
        tensors: token_level_rewards, advantages and returns, (B, R) of token_level_scores' dtype,
            0 on untrained tokens.
        metrics: of the KL penalty, if there is one.
    """

    tensors: dict[str, torch.Tensor]
    metrics: dict[str, float]


def estimate(
    rows: Rows, config: DictConfig, kl_controller: KlController | None = None
) -> Estimated:
    """Advantages and returns of B rows.

    Every rollout of the table counts, with or without rows. The number and the order of a
    rollout's rows have no influence.

    Args:
        rows: with token_level_scores; call_index if a rollout has several rows and estimator or
            credit depend on calls; old_log_probs and ref_log_prob for
            `algorithm.use_kl_in_reward`; values for `gae`; old_log_probs and sum_pi_squared for
            `optimal_token_baseline`.
        config: with verl's `algorithm` group and `agentlightning.credit`.
        kl_controller: verl's, for `algorithm.use_kl_in_reward`.

    Raises:
        ValueError: call_index or an input of the estimator is missing, or calls have credit and
            advantages are row-level.
    """
    algorithm = config.algorithm
    rollouts = rows.rollouts
    per_call = config.get("agentlightning", {}).get("credit") == "per_call"
    credited = any(rollout.call_credits is not None for rollout in rollouts)
    if not algorithm.get("enable_rollout_level_advantage", True):
        if per_call or credited:
            raise ValueError(
                "calls have credit, and algorithm.enable_rollout_level_advantage=false: expected "
                "true, as rows have none"
            )
        return _of_rows(rows, algorithm, kl_controller)
    compares = str(algorithm.adv_estimator) in OF_ROLLOUTS
    tokens = rows.trained_tokens(by_call=per_call or credited or not compares)
    by_rollout = tokens.by_rollout()
    rewards = rows.tensors["token_level_scores"]
    metrics: dict[str, float] = {}
    penalty = torch.zeros_like(rewards)
    if algorithm.use_kl_in_reward:
        penalty, metrics = _kl_penalty(rows, by_rollout, algorithm, kl_controller)
        rewards = rewards - penalty

    if compares and per_call:
        advantages = _of_calls(tokens, rollouts, penalty, algorithm)
        returns = advantages
    elif compares:
        of_rollout = rollout_advantages(
            rollouts, algorithm, by_rollout.lengths.tolist(), _sums(by_rollout, penalty)
        )
        advantages = by_rollout.scatter(_constant(by_rollout, of_rollout), rewards)
        returns = advantages
    else:
        earned = _placed(tokens, rollouts, per_call=per_call)
        earned -= by_rollout.gather(penalty).to(torch.float64)
        tensors = rows.tensors
        estimated = along_sequences(
            [rollout.data_id for rollout in rollouts],
            earned,
            by_rollout.mask,
            algorithm,
            lambda name: by_rollout.gather(tensors[name]) if name in tensors else None,
        )
        advantages, returns = (by_rollout.scatter(each, rewards) for each in estimated)
    if credited:
        advantages = advantages * _credits(tokens, rollouts, advantages)
    return Estimated(
        {"token_level_rewards": rewards, "advantages": advantages, "returns": returns}, metrics
    )


def rollout_advantages(
    rollouts: Sequence[agl_fast.RolloutEntry],
    algorithm: DictConfig,
    n_tokens: Sequence[int],
    penalties: Sequence[float],
) -> torch.Tensor:
    """(rollouts,) float64 advantages of a group estimator (`OF_ROLLOUTS`).

    Args:
        algorithm: verl's `algorithm` group of the configuration.
        n_tokens: (rollouts,) trained tokens.
        penalties: (rollouts,) subtracted from the rewards (`use_kl_in_reward`).
    """
    return compare(
        [rollout.data_id for rollout in rollouts],
        [rollout.reward - penalty for rollout, penalty in zip(rollouts, penalties, strict=True)],
        n_tokens,
        algorithm,
    )


def rewards_of_calls(rollout: agl_fast.RolloutEntry, trained: Sequence[int]) -> list[float]:
    """The reward of each trained call of a rollout.

    The reward of an untrained call goes to the last trained call before it, if any. If no call has
    a reward, the last trained call gets the rollout's.

    Args:
        trained: indices of the trained calls, ascending.
    """
    earned = [0.0] * len(trained)
    if not len(trained):
        return earned
    if rollout.call_rewards is None:
        earned[-1] = rollout.reward
        return earned
    owners = np.searchsorted(trained, np.arange(len(rollout.call_rewards)), side="right") - 1
    for owner, reward in zip(owners.tolist(), rollout.call_rewards, strict=True):
        if owner >= 0 and reward is not None:
            earned[owner] += reward
    return earned


def _of_calls(
    tokens: TrainedTokens,
    rollouts: Sequence[agl_fast.RolloutEntry],
    penalty: torch.Tensor,
    algorithm: DictConfig,
) -> torch.Tensor:
    """Compare calls with calls; a rollout without a trained call counts once, with its reward."""
    by_call, rollout_of_call, call = tokens.by_call()
    earned = _earned(rollouts, rollout_of_call, call) - np.array(_sums(by_call, penalty))
    with_one = set(rollout_of_call.tolist())
    without = [each for number, each in enumerate(rollouts) if number not in with_one]
    advantages = compare(
        [rollouts[number].data_id for number in rollout_of_call]
        + [rollout.data_id for rollout in without],
        [*earned.tolist(), *(rollout.reward for rollout in without)],
        [*by_call.lengths.tolist(), *(0 for _ in without)],
        algorithm,
    )
    return by_call.scatter(_constant(by_call, advantages[: len(call)]), penalty)


def _placed(
    tokens: TrainedTokens, rollouts: Sequence[agl_fast.RolloutEntry], *, per_call: bool
) -> torch.Tensor:
    """(rollouts, L) float64: each reward on the last token of its rollout or call.

    The reward of a rollout without trained tokens is at index 0, where the mask is 0: estimators
    that sum rewards include it.
    """
    by_rollout = tokens.by_rollout()
    placed = torch.zeros(by_rollout.shape, dtype=torch.float64)
    if not per_call:
        last = np.maximum(by_rollout.lengths - 1, 0)
        rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
        placed[np.arange(len(rollouts)), last] = rewards
        return placed
    by_call, rollout_of_call, call = tokens.by_call()
    ends = np.cumsum(by_call.lengths) - 1
    earned = torch.from_numpy(_earned(rollouts, rollout_of_call, call))
    placed[rollout_of_call, by_rollout.place[ends]] = earned
    for number in np.flatnonzero(by_rollout.lengths == 0).tolist():
        placed[number, 0] = rollouts[number].reward
    return placed


def _earned(
    rollouts: Sequence[agl_fast.RolloutEntry], rollout_of_call: Numbers, call: Numbers
) -> NDArray[np.float64]:
    """(C,) rewards of the trained calls."""
    earned: list[float] = []
    numbers, begins = np.unique(rollout_of_call, return_index=True)
    for number, calls in zip(numbers.tolist(), np.split(call, begins[1:]), strict=True):
        earned += rewards_of_calls(rollouts[number], calls.tolist())
    return np.array(earned, dtype=np.float64)


def _credits(
    tokens: TrainedTokens, rollouts: Sequence[agl_fast.RolloutEntry], like: torch.Tensor
) -> torch.Tensor:
    """(B, R) credit of the call of each trained token."""
    by_call, rollout_of_call, call = tokens.by_call()
    of_call = [
        1.0 if (credits := rollouts[number].call_credits) is None else credits[index]
        for number, index in zip(rollout_of_call.tolist(), call.tolist(), strict=True)
    ]
    return by_call.scatter(_constant(by_call, torch.tensor(of_call, dtype=torch.float64)), like)


def _kl_penalty(
    rows: Rows, by_rollout: Sequences, algorithm: DictConfig, kl_controller: KlController | None
) -> tuple[torch.Tensor, dict[str, float]]:
    """(B, R) penalty of each trained token for its divergence from the reference policy.

    verl's controller gets the mean over rollouts of the mean over their tokens; in verl it gets
    the mean over rows.
    """
    assert kl_controller is not None
    tensors = rows.tensors
    kl = kl_penalty(tensors["old_log_probs"], tensors["ref_log_prob"], algorithm.kl_penalty)
    trained = by_rollout.lengths > 0
    means = np.array(_sums(by_rollout, kl))[trained] / by_rollout.lengths[trained]
    current = float(means.mean()) if len(means) else 0.0
    coefficient = kl_controller.value
    kl_controller.update(current_kl=current, n_steps=len(means))
    return coefficient * rows.on_trained(kl), _kl_metrics(current, coefficient)


def _kl_metrics(current: float, coefficient: float) -> dict[str, float]:
    return {
        "actor/reward_kl_penalty": current,
        "actor/reward_kl_penalty_coeff": coefficient,
    }


def _sums(sequences: Sequences, values: torch.Tensor) -> list[float]:
    """(S,) sums of values (B, R), in float64 and in token order."""
    sums: list[float] = sequences.gather(values.to(torch.float64)).sum(dim=1).tolist()
    return sums


def _constant(sequences: Sequences, of_sequence: torch.Tensor) -> torch.Tensor:
    """(S, L): one value on all tokens of a sequence."""
    return of_sequence[:, None].expand(sequences.shape)


def _of_rows(rows: Rows, algorithm: DictConfig, kl_controller: KlController | None) -> Estimated:
    """verl's row-level estimate: every row is a sample with the rollout's reward."""
    mask = rows.response_mask
    # verl multiplies by the mask, which keeps NaN and infinity.
    finite = {
        name: rows.on_trained(rows.tensors[name]) for name in _OF_TOKENS if name in rows.tensors
    }
    rewards = rows.tensors["token_level_scores"]
    metrics: dict[str, float] = {}
    if algorithm.use_kl_in_reward:
        assert kl_controller is not None
        penalty = algorithm.kl_penalty
        kl = kl_penalty(finite["old_log_probs"], finite["ref_log_prob"], penalty) * mask
        current = masked_mean(kl, mask=mask, axis=-1).mean(dim=0).item()
        metrics = _kl_metrics(current, kl_controller.value)
        rewards = rewards - kl_controller.value * kl
        kl_controller.update(current_kl=current, n_steps=len(rows))
    advantages, returns = of_rows(rows.group_of_row, rewards, mask, algorithm, finite.get)
    return Estimated(
        {"token_level_rewards": rewards, "advantages": advantages, "returns": returns}, metrics
    )
