"""Advantages are those of rollouts, however many rows a rollout became: estimators that compare."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import AdvantageEstimator

from agl_fast import Call, Rollout
from agl_fast.training.estimators import OF_ROLLOUTS, REFUSED, compare, require_supported
from support.estimated_batches import LEVELS, Controller, advantages, build, configured, estimated

GROUP = [1.0, 0.0, 0.0, 0.5]


def values(
    rewards: Sequence[float], estimator: str, *, groups: str = "", n_tokens=None, **settings
) -> list[float]:
    found = compare(
        list(groups) or ["a"] * len(rewards),
        rewards,
        n_tokens or [3] * len(rewards),
        OmegaConf.create({"adv_estimator": estimator, **settings}),
    )
    return found.tolist()


@pytest.mark.parametrize("estimator", ["grpo", "grpo_vectorized"])
def test_grpo_is_the_reward_in_units_of_its_groups_spread(estimator):
    # mean 0.375, squared distances 0.390625 + 2 × 0.140625 + 0.015625 = 0.6875, over 3
    spread = (0.6875 / 3) ** 0.5 + 1e-6
    expected = [0.625 / spread, -0.375 / spread, -0.375 / spread, 0.125 / spread]
    assert values(GROUP, estimator) == pytest.approx(expected)
    centred = values(GROUP, estimator, norm_adv_by_std_in_grpo=False)  # Dr. GRPO
    assert centred == pytest.approx([0.625, -0.375, -0.375, 0.125])


@pytest.mark.parametrize("estimator", ["rloo", "rloo_vectorized"])
def test_rloo_compares_with_the_mean_of_the_others(estimator):
    assert values(GROUP, estimator) == pytest.approx([1 - 0.5 / 3, -0.5, -0.5, 0.5 - 1 / 3])


def test_reinforce_plus_plus_baseline_whitens_over_trained_tokens():
    # Centred: 0.5, -0.5, 1, -1 on 1, 5, 2 and 2 tokens: sum -2, squares 5.5, of 10 tokens.
    mean, variance = -0.2, (5.5 - 10 * 0.04) / 9
    expected = [(each - mean) / variance**0.5 for each in (0.5, -0.5, 1.0, -1.0)]
    found = values(
        [1.0, 0.0, 2.0, 0.0],
        "reinforce_plus_plus_baseline",
        groups="aabb",
        n_tokens=[1, 5, 2, 2],
    )
    assert found == pytest.approx(expected)


def test_opo_weighs_the_baseline_by_length():
    assert values([1.0, 0.0], "opo", n_tokens=[1, 3]) == pytest.approx([0.75, -0.25])


def test_pass_at_k_rewards_the_best_by_its_lead():
    settings = {"norm_adv_by_std_in_grpo": False}
    assert values(GROUP, "grpo_passk", **settings) == pytest.approx([0.5, 0, 0, 0])
    scaled = 0.5 / ((0.6875 / 3) ** 0.5 + 1e-6)
    assert values(GROUP, "grpo_passk") == pytest.approx([scaled, 0, 0, 0])


def test_gpg_scales_by_how_many_rewards_are_not_0():
    expected = [4 / 2 * (reward - 0.375) for reward in GROUP]
    assert values(GROUP, "gpg") == pytest.approx(expected)


@pytest.mark.parametrize("estimator", sorted(OF_ROLLOUTS))
def test_a_sample_without_company_has_advantage_0(estimator):
    found = values([*GROUP, 5.0], estimator, groups="aaaab")
    assert found[4] == 0.0
    assert found[0] > 0.0
    assert values([5.0], estimator) == [0.0]


@pytest.mark.parametrize("estimator", sorted(OF_ROLLOUTS))
def test_equal_rewards_have_advantage_0(estimator):
    assert values([0.7] * 8, estimator) == pytest.approx([0.0] * 8, abs=1e-6)


def a_in_three_rows_b_in_one() -> list[Rollout]:
    a = [Call([1], [2, 3]), Call([50], [51]), Call([60, 61], [62, 63, 64])]
    return [Rollout("A", "g", a, 1.0), Rollout("B", "g", [Call([1], [4])], 0.0)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("estimator", "of_a", "of_b"),
    [
        # Of rows, the mean would be 0.75.
        ("gpg", 2 * 0.5, 2 * -0.5),
        ("grpo", 0.5 / (0.5**0.5 + 1e-6), -0.5 / (0.5**0.5 + 1e-6)),
        ("opo", 1 - 6 / 7, 0 - 6 / 7),
        ("rloo", 1.0, -1.0),
    ],
)
def test_a_rollout_of_three_rows_is_one_of_two(level, estimator, of_a, of_b):
    batch = build(a_in_three_rows_b_in_one(), level)
    assert batch.columns["rollout_id_list"].tolist() == ["A", "A", "A", "B"]
    found = advantages(batch, configured(estimator))
    assert len(found) == 7
    for (rollout, _, _), advantage in found.items():
        assert advantage == pytest.approx(of_a if rollout == "A" else of_b)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "gpg"])
def test_rollouts_without_rows_count_in_their_group(estimator):
    rollouts = a_in_three_rows_b_in_one()
    with_c = build([*rollouts, Rollout("C", "g", [Call([1, 2], [])], 5.0)])
    assert with_c.rollouts[2].n_rows == 0
    settings = configured(estimator, norm_adv_by_std_in_grpo=False)
    found = advantages(with_c, settings)
    expected = {"grpo": 1 - 2, "rloo": 1 - 2.5, "gpg": 3 / 2 * (1 - 2)}[estimator]
    assert found["A", 0, 0] == pytest.approx(expected)


def test_truncated_rollouts_count_with_the_reward_they_are_given():
    rollouts = a_in_three_rows_b_in_one()
    for truncated_rollouts, of_b in (("train", -1.0), ("mask", -1.0), ("zero_reward", 0.0)):
        batch = build(rollouts, max_response_length=2, truncated_rollouts=truncated_rollouts)
        assert [entry.truncated for entry in batch.rollouts] == [True, False]
        assert advantages(batch, configured("rloo"))["B", 0, 0] == of_b


def test_nothing_stands_on_what_is_not_trained():
    calls = [Call([1], [2]), Call([1, 2, 7, 7], [3])]
    batch = build([Rollout("A", "g", calls, 1.0), Rollout("B", "g", [Call([1], [4])], 0.0)])
    found = estimated(batch, configured("rloo")).tensors
    assert found["advantages"].dtype == torch.float32
    assert found["advantages"].tolist() == [[1.0, 0.0, 0.0, 1.0], [-1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("level", LEVELS)
def test_every_trained_token_pays_for_its_divergence_once(level):
    # A: a call that the next one repeats and continues; what it repeats is not paid for again.
    calls = [Call([1], [2, 3]), Call([1, 2, 3, 7], [4])]
    batch = build([Rollout("A", "g", calls, 1.0), Rollout("B", "g", [Call([1], [4])], 1.0)], level)
    kl = {("A", 0, 0): 0.5, ("A", 0, 1): 0.25, ("A", 1, 0): 0.0, ("B", 0, 0): -1.0}
    controller = Controller(0.2)
    found = estimated(
        batch,
        configured("rloo", use_kl_in_reward=True),
        controller,
        old_log_probs=kl,
        ref_log_prob=torch.zeros_like(batch.tensors["token_level_scores"]),
    )
    # Rewards 1 - 0.2 × 0.75 and 1 + 0.2.
    tokens = found.tensors["advantages"][batch.tensors["response_mask"].bool()]
    assert tokens.tolist() == pytest.approx([-0.35, -0.35, -0.35, 0.35])
    # Of rollouts: the mean of 0.25 and -1.
    assert controller.told == {"current_kl": pytest.approx(-0.375), "n_steps": 2}
    assert found.metrics["actor/reward_kl_penalty"] == pytest.approx(-0.375)


def test_verls_rows_are_a_switch_away():
    batch = build(a_in_three_rows_b_in_one())
    config = configured("grpo", enable_rollout_level_advantage=False, norm_adv_by_std_in_grpo=False)
    found = advantages(batch, config)
    assert found["A", 0, 0] == pytest.approx(0.25)  # three rows of 1, one of 0
    assert found["B", 0, 0] == pytest.approx(-0.75)


def whole(estimator: str, **settings) -> object:
    composed = {"algorithm": {"adv_estimator": estimator}, "actor_rollout_ref": {"actor": {}}}
    return OmegaConf.merge(
        composed, OmegaConf.from_dotlist([f"{k}={v}" for k, v in settings.items()])
    )


@pytest.mark.parametrize("estimator", sorted(REFUSED))
def test_what_cannot_be_computed_is_refused_by_name(estimator):
    with pytest.raises(ValueError, match=estimator):
        require_supported(whole(estimator))


SQUARES = {"actor_rollout_ref.actor.calculate_sum_pi_squared": True}


def test_estimators_that_verl_knows_are_supported_or_refused():
    for estimator in AdvantageEstimator:
        if estimator.value not in REFUSED:
            require_supported(whole(estimator.value, **SQUARES))
    with pytest.raises(ValueError, match=r"'mine'.*nobody registered it"):
        require_supported(whole("mine"))


@pytest.mark.parametrize(
    ("estimator", "settings", "key"),
    [
        ("gae", {"algorithm.use_pf_ppo": True}, "use_pf_ppo=true"),
        ("optimal_token_baseline", {}, "calculate_sum_pi_squared=False"),
        (
            "tir_optimal_token_baseline",
            {**SQUARES, "algorithm.rollout_correction.bypass_mode": True},
            "bypass_mode=True",
        ),
    ],
)
def test_what_does_not_go_together(estimator, settings, key):
    with pytest.raises(ValueError, match=key):
        require_supported(whole(estimator, **settings))


def test_the_table_and_the_rows_must_be_of_one_batch():
    batch = build(a_in_three_rows_b_in_one())
    batch.rollouts.pop(0)
    with pytest.raises(KeyError, match="A"):
        estimated(batch, configured("grpo"))


def test_numbers_of_a_big_group_are_those_of_numpy():
    rewards = np.random.default_rng(1).normal(size=64)
    found = values(rewards.tolist(), "grpo")
    assert found == pytest.approx((rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6))
