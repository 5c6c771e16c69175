"""The built-in credit strategies, functions from a rollout to a rollout."""

from __future__ import annotations

from typing import get_args

import pytest
from omegaconf import OmegaConf

from agl_fast import Call, Rollout
from agl_fast.training.credit import (
    STRATEGIES,
    credit_assignment,
    discounted,
    identical,
    last_call,
    per_call,
    trainable_calls,
)
from agl_fast.verl.config.schema import AgentLightningKeys


def rollout(*calls: Call, reward: float | None = 4.0) -> Rollout:
    return Rollout("r", "g", list(calls), reward, status="succeeded", sample={"task": 7})


def three_and_others() -> Rollout:
    return rollout(
        Call([1], [2], response_id="a"),
        Call([1], [2], trainable=False),
        Call([1], [2], response_id="b", reward=1.5),
        Call([1], []),
        Call([1], [2], response_id="c", reward=float("nan")),
        Call([1], [2], response_id="a"),  # recorded twice
        Call([1], [2], finish_reason="abort"),
    )


def credits_of(rollout: Rollout) -> list[float]:
    return [call.credit for call in rollout.calls]


def test_names_are_those_of_the_configuration():
    names = get_args(AgentLightningKeys.model_fields["credit"].annotation)
    assert set(names) == set(STRATEGIES)


def test_trainable_calls():
    assert trainable_calls(three_and_others()) == [0, 2, 4]


def test_identical_changes_nothing():
    given = three_and_others()
    assert identical(given) is given


def test_last_call():
    assert credits_of(last_call(three_and_others())) == [0, 0, 0, 0, 1, 0, 0]


def test_discounted():
    assert credits_of(discounted(three_and_others(), 0.5)) == [0.25, 0, 0.5, 0, 1, 0, 0]


def test_per_call():
    found = per_call(three_and_others())
    assert [call.reward for call in found.calls] == [0, 0, 1.5, 0, 0, 0, 0]
    assert credits_of(found) == [1.0] * 7


def test_per_call_without_rewards_gives_the_last_trainable_one_the_rollouts():
    found = per_call(rollout(Call([1], [2]), Call([1], [2]), Call([1], [2], trainable=False)))
    assert [call.reward for call in found.calls] == [0, 4.0, 0]


def test_per_call_leaves_a_rollout_without_any_reward_without_one():
    missing = per_call(rollout(Call([1], [2]), reward=None))
    assert [call.reward for call in missing.calls] == [None]
    assert missing.reward is None


def test_per_call_keeps_the_reward_that_the_rollout_has_from_its_calls():
    found = per_call(rollout(Call([1], [2], reward=1.0), Call([1, 2], [3]), reward=None))
    assert found.reward == 1.0
    assert [call.reward for call in found.calls] == [1.0, 0.0]


def test_per_call_counts_the_reward_of_a_call_recorded_twice_once():
    once = Call([1], [2], reward=1.0, response_id="a")
    found = per_call(rollout(once, once, reward=None))
    assert [call.reward for call in found.calls] == [1.0, 0.0]
    later = per_call(rollout(Call([1], [2], response_id="a"), Call([3], [4]), once, reward=None))
    assert [call.reward for call in later.calls] == [1.0, 0.0, 0.0]


def test_per_call_names_a_reward_that_is_none():
    with pytest.raises(TypeError, match="rollout 'r', call 1: reward must be a"):
        per_call(rollout(Call([1], [2]), Call([1], [2], reward="good")))


@pytest.mark.parametrize("strategy", [last_call, per_call, lambda each: discounted(each, 0.5)])
def test_the_rest_stays_and_the_given_rollout_is_untouched(strategy):
    given = three_and_others()
    found = strategy(given)
    assert credits_of(given) == [1.0] * 7
    assert given.calls[0].reward is None
    for name in ("rollout_id", "data_id", "reward", "status", "sample"):
        assert getattr(found, name) == getattr(given, name)
    for before, after in zip(given.calls, found.calls, strict=True):
        assert before.response_ids is after.response_ids
        assert before.response_id == after.response_id
    assert strategy(rollout()).calls == []


def test_the_hook_comes_before_the_strategy():
    settings = OmegaConf.create(
        {
            "rollout_hook": f"{__name__}:without_the_last_call",
            "credit": "discounted",
            "credit_discount": 0.5,
        }
    )
    (found,) = credit_assignment(settings)(rollout(Call([1], [2]), Call([1], [2]), Call([1], [2])))
    assert credits_of(found) == [0.5, 1.0]


def without_the_last_call(rollout: Rollout) -> Rollout:
    return Rollout(rollout.rollout_id, rollout.data_id, rollout.calls[:-1], rollout.reward)
