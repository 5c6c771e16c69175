"""Advantages per rollout, then per token: docs/algorithm.md says how, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from verl import DataProto
from verl.trainer.ppo.core_algos import kl_penalty
from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage

import agl_fast
from agl_fast.training.estimators import OF_ROLLOUTS, along_sequences, compare
from agl_fast.training.trained_tokens import (
    Numbers,
    Sequences,
    TrainedTokens,
    call_numbers,
    on_trained,
)

# What workers compute for every token of a row, also for those that are not trained.
_OF_TOKENS = ("old_log_probs", "ref_log_prob", "values", "sum_pi_squared", "rollout_is_weights")

Tensors = Mapping[str, torch.Tensor]
Columns = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Estimated:
    """What a step learns from.

    Attributes:
        tensors: token_level_rewards, advantages and returns, (B, R) of token_level_scores' dtype,
            0 on what is not trained.
        metrics: of the KL penalty, if there is one.
    """

    tensors: dict[str, torch.Tensor]
    metrics: dict[str, float]


def estimate(
    tensors: Tensors,
    columns: Columns,
    rollouts: Sequence[agl_fast.RolloutEntry],
    config: Any,
    kl_controller: Any = None,
) -> Estimated:
    """Advantages and returns of B rows.

    Every rollout of the table counts, whether or not it has rows. Into how many rows a rollout
    fell, and where they stand, changes nothing.

    Args:
        tensors: (B, R) response_mask and token_level_scores; call_index where a rollout has several
            rows, and the estimator or the credit looks at calls; old_log_probs and ref_log_prob for
            `algorithm.use_kl_in_reward`; values for `gae`; old_log_probs and sum_pi_squared for
            `optimal_token_baseline`.
        columns: (B,) rollout_id_list, and data_id_list for row-level advantages.
        config: verl's `algorithm` group, and `agentlightning.credit`.
        kl_controller: verl's, for `algorithm.use_kl_in_reward`.

    Raises:
        ValueError: call_index is missing where it is needed, or something of the estimator's; or
            calls have credit and rows are compared.
    """
    algorithm = config.algorithm
    per_call = config.get("agentlightning", {}).get("credit") == "per_call"
    credited = any(rollout.call_credits is not None for rollout in rollouts)
    if not algorithm.get("enable_rollout_level_advantage", True):
        if per_call or credited:
            raise ValueError(
                "calls have credit, and algorithm.enable_rollout_level_advantage=false: expected "
                "true, as rows have none"
            )
        return _of_rows(tensors, columns, algorithm, kl_controller)
    compares = str(algorithm.adv_estimator) in OF_ROLLOUTS
    tokens = TrainedTokens.of(
        tensors["response_mask"],
        call_numbers(tensors, columns)
        if per_call or credited or not compares
        else torch.zeros_like(tensors["response_mask"]),
        columns["rollout_id_list"],
        [rollout.rollout_id for rollout in rollouts],
    )
    by_rollout = tokens.by_rollout()
    rewards = tensors["token_level_scores"]
    metrics: dict[str, float] = {}
    penalty = torch.zeros_like(rewards)
    if algorithm.use_kl_in_reward:
        penalty, metrics = _kl_penalty(tensors, by_rollout, algorithm, kl_controller)
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
        found = along_sequences(
            [rollout.data_id for rollout in rollouts],
            earned,
            by_rollout.mask,
            algorithm,
            lambda name: by_rollout.gather(tensors[name]) if name in tensors else None,
        )
        advantages, returns = (by_rollout.scatter(each, rewards) for each in found)
    if credited:
        advantages = advantages * _credits(tokens, rollouts, advantages)
    return Estimated(
        {"token_level_rewards": rewards, "advantages": advantages, "returns": returns}, metrics
    )


def rollout_advantages(
    rollouts: Sequence[agl_fast.RolloutEntry],
    algorithm: Mapping[str, Any],
    n_tokens: Sequence[int],
    penalties: Sequence[float],
) -> torch.Tensor:
    """(rollouts,) float64: what an estimator of `OF_ROLLOUTS` gives each rollout.

    Args:
        algorithm: verl's `algorithm` group of the configuration.
        n_tokens: (rollouts,) trained tokens.
        penalties: (rollouts,) taken off their rewards (`use_kl_in_reward`).
    """
    return compare(
        [rollout.data_id for rollout in rollouts],
        [rollout.reward - off for rollout, off in zip(rollouts, penalties, strict=True)],
        n_tokens,
        algorithm,
    )


def rewards_of_calls(rollout: agl_fast.RolloutEntry, trained: Sequence[int]) -> list[float]:
    """What each trained call of a rollout earned.

    The reward of a call that is not trained goes to the last trained call before it, if there is
    one. Where no call has a reward, the last trained call has the rollout's.

    Args:
        trained: their indices, ascending.
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
    algorithm: Any,
) -> torch.Tensor:
    """Calls compared with calls; a rollout without a trained one counts once, with its reward."""
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
    """(rollouts, L) float64: rewards where they are earned, on the last token of what earns them.

    That of a rollout without tokens stands in front, where the mask is 0: estimators that sum up
    rewards see it.
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
    """(C,) of every trained call."""
    earned: list[float] = []
    numbers, begins = np.unique(rollout_of_call, return_index=True)
    for number, calls in zip(numbers.tolist(), np.split(call, begins[1:]), strict=True):
        earned += rewards_of_calls(rollouts[number], calls.tolist())
    return np.array(earned, dtype=np.float64)


def _credits(
    tokens: TrainedTokens, rollouts: Sequence[agl_fast.RolloutEntry], like: torch.Tensor
) -> torch.Tensor:
    """(B, R): on each trained token the credit of its call."""
    by_call, rollout_of_call, call = tokens.by_call()
    of_call = [
        1.0 if (given := rollouts[number].call_credits) is None else given[index]
        for number, index in zip(rollout_of_call.tolist(), call.tolist(), strict=True)
    ]
    return by_call.scatter(_constant(by_call, torch.tensor(of_call, dtype=torch.float64)), like)


def _kl_penalty(
    tensors: Tensors, by_rollout: Sequences, algorithm: Any, kl_controller: Any
) -> tuple[torch.Tensor, dict[str, float]]:
    """(B, R): what each trained token pays for leaving the reference policy.

    verl's controller is told the mean over rollouts of each one's mean over its tokens, where verl
    takes rows.
    """
    kl = kl_penalty(tensors["old_log_probs"], tensors["ref_log_prob"], algorithm.kl_penalty)
    trained = by_rollout.lengths > 0
    means = np.array(_sums(by_rollout, kl))[trained] / by_rollout.lengths[trained]
    current = float(means.mean()) if len(means) else 0.0
    coefficient = kl_controller.value
    kl_controller.update(current_kl=current, n_steps=len(means))
    return coefficient * on_trained(kl, tensors["response_mask"]), {
        "actor/reward_kl_penalty": current,
        "actor/reward_kl_penalty_coeff": coefficient,
    }


def _sums(sequences: Sequences, values: torch.Tensor) -> list[float]:
    """(S,) of values (B, R), in float64 and in the order of the tokens."""
    sums: list[float] = sequences.gather(values.to(torch.float64)).sum(dim=1).tolist()
    return sums


def _constant(sequences: Sequences, of_sequence: torch.Tensor) -> torch.Tensor:
    """(S, L): the same number on all tokens of a sequence."""
    return of_sequence[:, None].expand(sequences.shape)


def _of_rows(tensors: Tensors, columns: Columns, algorithm: Any, kl_controller: Any) -> Estimated:
    """verl's estimate, of rows: each is a sample of its own, with the rollout's reward."""
    mask = tensors["response_mask"]
    # verl masks by a product, which NaN and infinity pass.
    finite = {name: on_trained(tensors[name], mask) for name in _OF_TOKENS if name in tensors}
    rows = DataProto.from_dict(
        tensors={**tensors, **finite},
        non_tensors={"uid": np.asarray(columns["data_id_list"], object)},
    )
    metrics: dict[str, float] = {}
    rows.batch["token_level_rewards"] = tensors["token_level_scores"]
    if algorithm.use_kl_in_reward:
        rows, metrics = apply_kl_penalty(rows, kl_controller, algorithm.kl_penalty)
    rows = compute_advantage(
        rows,
        adv_estimator=algorithm.adv_estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
        config=algorithm,
    )
    names = ("token_level_rewards", "advantages", "returns")
    return Estimated({name: rows.batch[name] for name in names}, metrics)
