"""How credits and rewards of calls reach the advantages of a group estimator."""

from __future__ import annotations

import pytest

from agl_fast import Call, Rollout
from support.estimated_batches import LEVELS, advantages, build, configured

# Of A's three calls the middle one is a judge's.
A = [
    Call([1], [2, 3], reward=0.5, credit=0.25),
    Call([70], [71], reward=7.0, trainable=False),
    Call([1, 2, 3, 9], [4], reward=1.5),
]


def rollouts(*, of_b: float | None = None) -> list[Rollout]:
    b = Call([1], [5], reward=of_b)
    return [Rollout("A", "g", A, 2.0), Rollout("B", "g", [b], 1.0)]


@pytest.mark.parametrize("level", LEVELS)
def test_a_credit_scales_what_the_tokens_of_a_call_get(level):
    found = advantages(build(rollouts(), level), configured("rloo"))
    assert found == {("A", 0, 0): 0.25, ("A", 0, 1): 0.25, ("A", 2, 0): 1.0, ("B", 0, 0): -1.0}


@pytest.mark.parametrize("level", LEVELS)
def test_calls_are_compared_with_calls(level):
    # Rewards 0.5 + 7 (the judge's belongs to the call before it), 1.5, and B's 3: mean 4.
    batch = build(rollouts(of_b=3.0), level)
    config = configured("grpo", credit="per_call", norm_adv_by_std_in_grpo=False)
    found = advantages(batch, config)
    assert found == {
        ("A", 0, 0): 0.25 * 3.5,
        ("A", 0, 1): 0.25 * 3.5,
        ("A", 2, 0): -2.5,
        ("B", 0, 0): -1.0,
    }


def test_where_no_call_has_a_reward_the_last_one_has_the_rollouts():
    calls = [Call([1], [2]), Call([50], [51])]
    batch = build([Rollout("A", "g", calls, 2.0), Rollout("B", "g", [Call([1], [5])], 1.0)])
    found = advantages(batch, configured("rloo", credit="per_call"))
    assert found == {("A", 0, 0): -1.5, ("A", 1, 0): 1.5, ("B", 0, 0): 0.0}


def test_a_rollout_without_rows_counts_once_among_the_calls():
    empty = Rollout("C", "g", [Call([1, 2], [])], 6.0)
    batch = build([*rollouts(of_b=3.0), empty])
    config = configured("grpo", credit="per_call", norm_adv_by_std_in_grpo=False)
    assert advantages(batch, config)["B", 0, 0] == 3.0 - 18 / 4


def test_a_reward_before_the_first_trained_call_belongs_to_nobody():
    calls = [Call([70], [71], reward=7.0, trainable=False), Call([1], [2], reward=1.0)]
    batch = build([Rollout("A", "g", calls), Rollout("B", "g", [Call([1], [5])], 3.0)])
    found = advantages(batch, configured("rloo", credit="per_call"))
    assert found == {("A", 1, 0): -2.0, ("B", 0, 0): 2.0}


def test_truncated_rollouts_lose_their_calls_rewards_too():
    calls = [Call([1], [2], reward=5.0), Call([50], [51, 52, 53], reward=1.0)]
    others = Rollout("B", "g", [Call([1], [5])], 3.0)
    batch = build(
        [Rollout("A", "g", calls), others], max_response_length=2, truncated_rollouts="zero_reward"
    )
    config = configured("grpo", credit="per_call", norm_adv_by_std_in_grpo=False)
    assert advantages(batch, config)["B", 0, 0] == 2.0


@pytest.mark.parametrize("credit", ["identical", "per_call"])
def test_rows_have_no_credit(credit):
    config = configured("grpo", credit=credit, enable_rollout_level_advantage=False)
    with pytest.raises(ValueError, match="enable_rollout_level_advantage=false"):
        advantages(build(rollouts()), config)
