"""Estimators that look at tokens see a rollout as one sequence of calls."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
import torch
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, register_adv_est

from agl_fast import Call, Rollout
from support.estimated_batches import LEVELS, Controller, build, by_token, configured, estimated

GAMMA, LAM = 0.5, 0.8
# Values of the four trained tokens of A and the one of B.
VALUES = {
    ("A", 0, 0): 0.5,
    ("A", 0, 1): 1.0,
    ("A", 1, 0): -0.5,
    ("A", 1, 1): 0.25,
    ("B", 0, 0): 0.5,
}
# Worked out from the end: δ = r + 0.5·v' - v, then δ + 0.4·A' (0.4 is GAMMA times LAM).
#   A: δ₃ = 2 - 0.25 = 1.75          A₃ = 1.75
#      δ₂ = 0.125 + 0.5 = 0.625      A₂ = 0.625 + 0.4·1.75 = 1.325
#      δ₁ = -0.25 - 1.0 = -1.25      A₁ = -1.25 + 0.4·1.325 = -0.72
#      δ₀ = 0.5 - 0.5 = 0            A₀ = 0.4·-0.72 = -0.288
#   B: A = 1 - 0.5 = 0.5
GAE = dict(zip(VALUES, [-0.288, -0.72, 1.325, 1.75, 0.5], strict=True))


def whitened(expected: dict) -> dict:
    values = list(expected.values())
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return {key: (value - mean) / variance**0.5 for key, value in expected.items()}


def two_rows(*, continued: bool) -> list[Rollout]:
    """The second call of A continues the first, with an observation between, or does not."""
    prompt = [1, 2, 3, 7, 7] if continued else [50]
    calls = [Call([1], [2, 3], reward=0.5), Call(prompt, [4, 5], reward=2.0)]
    return [
        Rollout("A", "g", calls, 2.0),
        Rollout("B", "g", [Call([1], [4])], 1.0),
    ]


def close(found: dict, expected: dict) -> None:
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("continued", [True, False])
def test_gae_flows_back_over_rows_and_observations(level, continued):
    batch = build(two_rows(continued=continued), level)
    assert len(batch) == (2 if continued and level == "trajectory" else 3)
    found = estimated(batch, configured("gae", gamma=GAMMA, lam=LAM), values=VALUES).tensors
    close(by_token(batch, found["advantages"]), whitened(GAE))
    returns = {key: GAE[key] + VALUES[key] for key in GAE}
    close(by_token(batch, found["returns"]), returns)


@pytest.mark.parametrize("level", LEVELS)
def test_gae_with_rewards_of_calls(level):
    # The first call's 0.5 stands on its second token: A₁ and A₀ grow by 0.5 and 0.4·0.5.
    expected = {**GAE, ("A", 0, 0): GAE["A", 0, 0] + 0.2, ("A", 0, 1): GAE["A", 0, 1] + 0.5}
    batch = build(two_rows(continued=False), level)
    config = configured("gae", gamma=GAMMA, lam=LAM, credit="per_call")
    found = estimated(batch, config, values=VALUES).tensors
    close(by_token(batch, found["advantages"]), whitened(expected))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("credit", ["identical", "per_call"])
def test_reinforce_plus_plus_discounts_over_the_whole_rollout(level, credit):
    batch = build(two_rows(continued=False), level)
    found = estimated(batch, configured("reinforce_plus_plus", gamma=GAMMA, credit=credit)).tensors
    own = 0.5 if credit == "per_call" else 0.0
    returns = {
        ("A", 0, 0): 2 * 0.125 + own * 0.5,
        ("A", 0, 1): 2 * 0.25 + own,
        ("A", 1, 0): 2 * 0.5,
        ("A", 1, 1): 2.0,
        ("B", 0, 0): 1.0,
    }
    close(by_token(batch, found["returns"]), returns)
    close(by_token(batch, found["advantages"]), whitened(returns))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("estimator", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_the_optimal_baseline_of_a_token_is_that_of_its_place_in_the_rollout(estimator, level):
    calls = [Call([50], [51]), Call([60], [61])]
    batch = build([*two_rows(continued=False)[:1], Rollout("C", "g", calls, 1.0)], level)
    keys = [*list(VALUES)[:4], ("C", 0, 0), ("C", 1, 0)]
    # w = 1 - 2π + Σπ²: of A 0.5, 0.5, 1, 1 and of C 1, 1; W sums them up from the front.
    squares = dict(zip(keys, [0.5, 0.5, 1.0, 1.0, 1.0, 1.0], strict=True))
    found = estimated(
        batch,
        configured(estimator),
        old_log_probs=dict.fromkeys(keys, math.log(0.5)),
        sum_pi_squared=squares,
    ).tensors["advantages"]
    # Places 0 and 1: (2·0.5 + 1·1) / 1.5 and (2·1 + 1·2) / 3; then A is alone, without a baseline.
    close(
        by_token(batch, found), dict(zip(keys, [2 / 3, 2 / 3, 2, 2, -1 / 3, -1 / 3], strict=True))
    )


def test_a_lost_end_leaves_the_reward_on_the_last_trained_token():
    calls = [Call([1], [2, 3]), Call([50], [51, 52, 53])]
    batch = build([Rollout("A", "g", calls, 4.0)], "transition", max_response_length=2)
    found = estimated(batch, configured("reinforce_plus_plus", gamma=0.5)).tensors
    assert by_token(batch, found["returns"]) == {
        ("A", 0, 0): 0.5,
        ("A", 0, 1): 1.0,
        ("A", 1, 0): 2.0,
        ("A", 1, 1): 4.0,
    }


@pytest.mark.parametrize("level", LEVELS)
def test_kl_is_paid_where_it_arises_and_flows_back(level):
    batch = build(two_rows(continued=True), level)
    kl = dict.fromkeys(VALUES, 0.0) | {("A", 1, 0): 0.5}
    found = estimated(
        batch,
        configured("reinforce_plus_plus", gamma=GAMMA, use_kl_in_reward=True),
        Controller(0.2),
        old_log_probs=kl,
        ref_log_prob=torch.zeros_like(batch.tensors["token_level_scores"]),
    ).tensors
    returns = by_token(batch, found["returns"])
    assert returns["A", 1, 0] == pytest.approx(1.0 - 0.1)
    assert returns["A", 0, 1] == pytest.approx(0.5 - 0.05)
    assert returns["A", 0, 0] == pytest.approx(0.25 - 0.025)
    assert returns["A", 1, 1] == 2.0


def test_calls_that_take_turns_between_two_rows_stay_in_order():
    # Two agents in turn: rows hold calls 0 and 2, 1 and 3.
    calls = [
        Call([1], [2]),
        Call([50], [51]),
        Call([1, 2, 3], [4]),
        Call([50, 51, 52], [53]),
    ]
    batch = build([Rollout("A", "g", calls, 8.0)])
    assert len(batch) == 2
    found = estimated(batch, configured("reinforce_plus_plus", gamma=0.5)).tensors
    assert by_token(batch, found["returns"]) == {
        ("A", 0, 0): 1.0,
        ("A", 1, 0): 2.0,
        ("A", 2, 0): 4.0,
        ("A", 3, 0): 8.0,
    }


@pytest.fixture
def longest_wins() -> Iterator[str]:
    """An estimator of the user's own, which looks at rewards, lengths and groups."""

    @register_adv_est("longest_wins")
    def longest_wins(token_level_rewards, response_mask, index, config, **_):
        lengths = response_mask.sum(dim=1)
        best = torch.stack([lengths[index == group].max() for group in index])
        weights = token_level_rewards.sum(dim=1) * (lengths == best) * config.gamma
        return weights[:, None] * response_mask, response_mask

    yield "longest_wins"
    del ADV_ESTIMATOR_REGISTRY["longest_wins"]


@pytest.mark.parametrize("level", LEVELS)
def test_an_estimator_of_ones_own_sees_rollouts(level, longest_wins):
    batch = build(two_rows(continued=False), level)
    found = estimated(batch, configured(longest_wins, gamma=3.0)).tensors["advantages"]
    expected = {key: 6.0 if key[0] == "A" else 0.0 for key in VALUES}
    assert by_token(batch, found) == expected


def random_rollouts(seed: int) -> list[Rollout]:
    chances = random.Random(seed)

    def ids(n: int) -> list[int]:
        return [chances.randrange(1, 90) for _ in range(n)]

    made = []
    for number in range(8):
        prompt = ids(3)
        calls = []
        for _ in range(chances.randrange(1, 5)):
            reward = chances.choice([None, chances.random()])
            credit = chances.choice([1.0, chances.random()])
            calls.append(Call(prompt, ids(chances.randrange(1, 4)), reward=reward, credit=credit))
            continues = chances.random() < 0.6
            prompt = [*prompt, *calls[-1].response_ids, *ids(2)] if continues else ids(4)
        made.append(Rollout(f"r{number}", f"g{number // 3}", calls, chances.random()))
    return made


ESTIMATORS = [
    "gae",
    "reinforce_plus_plus",
    "gpg",
    "grpo",
    "grpo_passk",
    "opo",
    "reinforce_plus_plus_baseline",
    "rloo",
]


@pytest.mark.parametrize("credit", ["identical", "per_call"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("seed", range(3))
def test_levels_agree_token_by_token(estimator, credit, seed):
    config = configured(
        estimator, gamma=0.9, lam=0.7, credit=credit, use_kl_in_reward=True, kl_penalty="k3"
    )
    found = []
    for level in LEVELS:
        batch = build(random_rollouts(seed), level)
        if level == "trajectory":
            shuffle_rows(batch, seed)
        chances = random.Random(seed)
        keys = sorted(by_token(batch, batch.tensors["token_level_scores"]))
        drawn = {
            name: {key: chances.uniform(-2, 0) for key in keys}
            for name in ("values", "old_log_probs", "ref_log_prob")
        }
        tensors = estimated(batch, config, _controller(), **drawn).tensors
        found.append(
            [by_token(batch, tensors[name]) for name in ("advantages", "returns")],
        )
    assert found[0] == found[1]
    assert len(set(found[0][0].values())) > 3


def _controller():
    return Controller(0.1)


def shuffle_rows(batch, seed: int) -> None:
    order = list(range(len(batch)))
    random.Random(seed).shuffle(order)
    for name, tensor in batch.tensors.items():
        batch.tensors[name] = tensor[order]
    for name, column in batch.columns.items():
        batch.columns[name] = column[order]


def test_without_call_index_the_order_is_unknown():
    batch = build(two_rows(continued=True), call_index=False)
    with pytest.raises(ValueError, match="call_index=True"):
        estimated(batch, configured("reinforce_plus_plus"))
    estimated(batch, configured("grpo"))
    rows_are_calls = build(two_rows(continued=True), "transition", call_index=False)
    estimated(rows_are_calls, configured("reinforce_plus_plus"))


def test_gae_without_values():
    with pytest.raises(ValueError, match="'gae' needs values"):
        estimated(build(two_rows(continued=True)), configured("gae"))


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_a_single_token_cannot_be_whitened(estimator):
    batch = build([Rollout("A", "g", [Call([1], [2])], 1.0)])
    assert estimated(batch, configured(estimator)).tensors["advantages"].tolist() == [[0.0]]
