"""Advantages are those of rollouts, however many rows a rollout became."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from omegaconf import OmegaConf

import agl_fast
import verl_trainer_imports  # noqa: F401
from agl_fast.verl.trainer.advantages import (
    OF_ROLLOUTS,
    REFUSED,
    require_supported,
    rollout_advantages,
    spread,
)


def algorithm(estimator: str, **settings: object) -> object:
    return OmegaConf.create({"adv_estimator": estimator, **settings})


def entry(rollout_id: str, data_id: str, reward: float, *, trained: int = 3, n_rows: int = 1):
    accounting = replace(agl_fast.Accounting(), sampled=trained, trained=trained)
    return agl_fast.RolloutEntry(
        rollout_id, data_id, reward, True, n_rows, n_rows, accounting, False, "succeeded"
    )


GROUP = [1.0, 0.0, 0.0, 0.5]


def group(rewards=GROUP, **options):
    return [entry(f"a{i}", "a", reward, **options) for i, reward in enumerate(rewards)]


def values(rollouts, settings):
    found = rollout_advantages(rollouts, settings)
    return np.array([found[rollout.rollout_id] for rollout in rollouts])


def test_grpo_is_the_reward_in_units_of_its_groups_spread():
    rewards = np.array(GROUP)
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    assert values(group(), algorithm("grpo")) == pytest.approx(expected)
    centred = values(group(), algorithm("grpo", norm_adv_by_std_in_grpo=False))
    assert centred == pytest.approx(rewards - rewards.mean())


def test_rloo_compares_with_the_others():
    expected = [r - (sum(GROUP) - r) / 3 for r in GROUP]
    assert values(group(), algorithm("rloo")) == pytest.approx(expected)


def test_reinforce_plus_plus_baseline_whitens_over_trained_tokens():
    rollouts = [
        entry("a0", "a", 1.0, trained=1),
        entry("a1", "a", 0.0, trained=5),
        entry("b0", "b", 2.0, trained=2),
        entry("b1", "b", 0.0, trained=2),
    ]
    tokens = np.repeat([0.5, -0.5, 1.0, -1.0], [1, 5, 2, 2])
    expected = (np.array([0.5, -0.5, 1.0, -1.0]) - tokens.mean()) / tokens.std(ddof=1)
    found = values(rollouts, algorithm("reinforce_plus_plus_baseline"))
    assert found == pytest.approx(expected, rel=1e-4)


def test_opo_weighs_the_baseline_by_length():
    rollouts = [entry("a0", "a", 1.0, trained=1), entry("a1", "a", 0.0, trained=3)]
    assert values(rollouts, algorithm("opo")) == pytest.approx([0.75, -0.25])


@pytest.mark.parametrize("estimator", sorted(OF_ROLLOUTS))
def test_a_rollout_without_company_has_advantage_0(estimator):
    alone = entry("b0", "b", 5.0)
    found = rollout_advantages([*group(), alone], algorithm(estimator))
    assert found["b0"] == 0.0
    assert found["a0"] > 0.0
    assert rollout_advantages([alone], algorithm(estimator)) == {"b0": 0.0}


@pytest.mark.parametrize("estimator", sorted(OF_ROLLOUTS))
def test_equal_rewards_have_advantage_0(estimator):
    assert values(group([0.7] * 8), algorithm(estimator)) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("estimator", sorted(OF_ROLLOUTS))
def test_rollouts_without_rows_count_in_their_group(estimator):
    rollouts = [*group(), entry("a4", "a", 8.0, trained=0, n_rows=0)]
    with_it, without = (values(given, algorithm(estimator))[:4] for given in (rollouts, group()))
    if estimator in ("opo", "grpo_passk", "reinforce_plus_plus_baseline"):
        return  # by length; the best of the group only; centred on the tokens again
    assert with_it != pytest.approx(without)


def test_penalties_are_taken_off_the_reward():
    found = rollout_advantages(group([1.0, 1.0]), algorithm("rloo"), {"a0": 0.25})
    assert found == pytest.approx({"a0": -0.25, "a1": 0.25})


def test_rows_carry_their_rollouts_advantage_on_trained_tokens():
    call, other = agl_fast.Call([1, 2], [3, 4]), agl_fast.Call([9], [8])
    batch = agl_fast.build_batch(
        [
            agl_fast.Rollout("a0", "a", [call, other], 1.0),
            agl_fast.Rollout("a1", "a", [call], 0.0),
        ],
        max_prompt_length=4,
        max_response_length=4,
        pad_token_id=0,
        trim=True,
    )
    advantages = rollout_advantages(batch.rollouts, algorithm("rloo"))
    rows = spread(
        advantages, batch.columns["rollout_id_list"].tolist(), batch.tensors["response_mask"]
    )
    assert rows.tolist() == [[1.0, 1.0], [1.0, 0.0], [-1.0, -1.0]]


@pytest.mark.parametrize("estimator", sorted(REFUSED))
def test_what_would_be_wrong_is_refused_by_name(estimator):
    with pytest.raises(ValueError, match=estimator):
        require_supported(estimator)
    require_supported("gae")
