"""verl's advantage estimators, applied to rollouts or calls instead of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, get_adv_estimator_fn

# Group estimators: one advantage per sample, for all its trained tokens. verl's function gets one
# row per sample, so the number of rows of a rollout has no influence.
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
# These depend on the number of tokens of a sample.
_BY_LENGTH = frozenset({"opo", "reinforce_plus_plus_baseline"})
# Equal results, but the vectorized ones round to float32 in between.
_COMPUTED_AS = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}

# Inputs of verl's token-level estimators besides rewards, groups and the configuration.
_FURTHER = {
    "gae": ("values",),
    "optimal_token_baseline": ("old_log_probs", "sum_pi_squared", "rollout_is_weights"),
    "reinforce_plus_plus": (),
    "tir_optimal_token_baseline": ("old_log_probs", "sum_pi_squared", "rollout_is_weights"),
}
_OPTIONAL = {"rollout_is_weights"}

REFUSED = {
    "gdpo": "it needs several rewards per rollout, agents give one",
    "remax": "it needs a greedy rollout of every sample besides the sampled ones",
}


def require_supported(config: DictConfig) -> None:
    """Raise ValueError for an `algorithm.adv_estimator` that cannot be computed.

    Args:
        config: the whole configuration.
    """
    estimator = str(config.algorithm.adv_estimator)
    if estimator in REFUSED or estimator not in ADV_ESTIMATOR_REGISTRY:
        known = sorted({*OF_ROLLOUTS, *_FURTHER})
        nobody = "nobody registered it with verl.trainer.ppo.core_algos.register_adv_est"
        raise ValueError(
            f"algorithm.adv_estimator={estimator!r}: {REFUSED.get(estimator, nobody)}; expected "
            f"one of {', '.join(known)}, or a registered one"
        )
    if config.algorithm.get("use_pf_ppo"):
        raise ValueError(
            "algorithm.use_pf_ppo=true: expected false, as it resamples rows, not rollouts"
        )
    if "sum_pi_squared" in _FURTHER.get(estimator, ()):
        for key, expected in (
            ("actor_rollout_ref.actor.calculate_sum_pi_squared", True),
            ("algorithm.rollout_correction.bypass_mode", False),
        ):
            if bool(OmegaConf.select(config, key)) != expected:
                raise ValueError(
                    f"{key}={not expected} with algorithm.adv_estimator={estimator!r}: expected "
                    f"{expected}, as the estimator needs the actor's probabilities"
                )


def compare(
    groups: Sequence[Hashable],
    rewards: Sequence[float],
    n_tokens: Sequence[int],
    algorithm: DictConfig,
) -> torch.Tensor:
    """(S,) advantages of S samples by a group estimator (`OF_ROLLOUTS`).

    Singleton groups get advantage 0.

    Args:
        groups: (S,) group of each sample; samples of one group are compared.
        rewards: (S,)
        n_tokens: (S,) trained tokens.
        algorithm: verl's `algorithm` group of the configuration.

    Returns:
        (S,) float64.
    """
    estimator = str(algorithm["adv_estimator"])
    estimator = _COMPUTED_AS.get(estimator, estimator)
    advantages = torch.zeros(len(groups), dtype=torch.float64)
    sizes = Counter(groups)
    compared = [sample for sample, group in enumerate(groups) if sizes[group] > 1]
    lengths = torch.tensor([n_tokens[sample] for sample in compared], dtype=torch.int64)
    if estimator not in _BY_LENGTH:
        lengths = torch.ones_like(lengths)
    if lengths.sum() < 2:
        return advantages

    # float64, as verl divides by the group's spread: rounding must not make one of equal rewards.
    scores = torch.zeros(len(compared), int(lengths.max()), dtype=torch.float64)
    scores[:, 0] = torch.tensor([rewards[sample] for sample in compared], dtype=torch.float64)
    mask = (torch.arange(scores.shape[1]) < lengths[:, None]).to(torch.float64)
    options: dict[str, Any] = {}
    if estimator == "grpo":
        options["norm_adv_by_std_in_grpo"] = algorithm.get("norm_adv_by_std_in_grpo", True)
    estimated, _ = get_adv_estimator_fn(estimator)(
        token_level_rewards=scores,
        response_mask=mask,
        index=_objects([groups[sample] for sample in compared]),
        config=algorithm,
        **options,
    )
    advantages[compared] = estimated[:, 0]
    return advantages


def along_sequences(
    groups: Sequence[Hashable],
    rewards: torch.Tensor,
    mask: torch.Tensor,
    algorithm: DictConfig,
    further: Callable[[str], torch.Tensor | None],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of S sequences of at most L tokens by a token-level estimator.

    Args:
        groups: (S,) group of each sequence, for estimators that compare.
        rewards: (S, L) float64.
        mask: (S, L) 1 on tokens.
        algorithm: verl's `algorithm` group of the configuration.
        further: returns (S, L) values, old_log_probs, sum_pi_squared or rollout_is_weights by
            name, None if absent.

    Returns:
        Advantages and returns, (S, L) float64.

    Raises:
        ValueError: an input of the estimator is missing.
    """
    mask = mask.to(torch.float64)
    if mask.sum() < 2:  # verl whitens over the tokens
        return torch.zeros_like(rewards), torch.zeros_like(rewards)
    return of_rows(
        groups,
        rewards,
        mask,
        algorithm,
        lambda name: None if (values := further(name)) is None else values.to(torch.float64),
    )


def of_rows(
    groups: Sequence[Hashable],
    rewards: torch.Tensor,
    mask: torch.Tensor,
    algorithm: DictConfig,
    further: Callable[[str], torch.Tensor | None],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of B rows by any estimator, as verl's own trainer calls it.

    Args:
        groups: (B,) group of each row.
        rewards: (B, R) token-level rewards.
        mask: (B, R) 1 on trained tokens.
        algorithm, further: as for `along_sequences`, in the rows' shape.

    Returns:
        Advantages and returns, (B, R).

    Raises:
        ValueError: an input of the estimator is missing.
    """
    estimator = str(algorithm["adv_estimator"])
    options: dict[str, Any] = {}
    for name in _FURTHER.get(estimator, ()):
        values = further(name)
        if values is not None:
            options[name] = values
        elif name not in _OPTIONAL:
            raise ValueError(f"algorithm.adv_estimator={estimator!r} needs {name} of every token")
    if estimator == "gae":
        options |= {"gamma": algorithm["gamma"], "lam": algorithm["lam"]}
    else:
        options["index"] = _objects(groups)
        if estimator == "grpo":
            options["norm_adv_by_std_in_grpo"] = algorithm.get("norm_adv_by_std_in_grpo", True)
        else:
            options["config"] = algorithm
    estimated: tuple[torch.Tensor, torch.Tensor] = get_adv_estimator_fn(estimator)(
        token_level_rewards=rewards, response_mask=mask, **options
    )
    return estimated


def _objects(groups: Sequence[Hashable]) -> np.ndarray[Any, Any]:
    """(S,) objects; tuples stay tuples."""
    return np.fromiter(groups, dtype=object, count=len(groups))
