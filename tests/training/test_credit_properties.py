"""Every credit strategy against its definition, over all that rewards and calls can be."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_fast import Call, EmptyBatchError, Rollout
from agl_fast.training.credit import STRATEGIES, discounted
from support.estimated_batches import LEVELS, advantages, build, configured

DISCOUNT = 0.5
FILL = -1.5
PROMPTS = {None: [1], "a": [1], "b": [1, 2, 3], "c": [9, 9]}  # of one response id: one call
RESPONSES = {None: [2], "a": [2], "b": [4, 5], "c": [6]}


@st.composite
def calls(draw: Any) -> Call:
    response_id = draw(st.sampled_from(list(PROMPTS)))
    is_empty = response_id is None and draw(st.booleans())
    return Call(
        PROMPTS[response_id],
        [] if is_empty else RESPONSES[response_id],
        reward=draw(st.sampled_from([None, float("nan"), 0.0, 1.0, -2.5, True])),
        response_id=response_id,
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        trainable=draw(st.booleans()),
    )


def rollouts(name: str) -> st.SearchStrategy[Rollout]:
    rewards = st.sampled_from([None, float("nan"), 0.0, 2.0])
    return st.builds(
        lambda calls, reward: Rollout(name, "g", calls, reward),
        st.lists(calls(), max_size=5),
        rewards,
    )


def present(reward: float | None) -> bool:
    return reward is not None and not math.isnan(reward)


def final(rollout: Rollout) -> tuple[float, bool]:
    found = [call.reward for call in rollout.calls if present(call.reward)]
    if present(rollout.reward):
        found.append(rollout.reward)
    return (float(found[-1]), True) if found else (FILL, False)


def records(rollout: Rollout) -> dict[int, list[int]]:
    """Of each call, its first record's index: the indices of all."""
    found: dict[int, list[int]] = {}
    for index, call in enumerate(rollout.calls):
        first = next(
            (
                each
                for each in found
                if call.response_id and rollout.calls[each].response_id == call.response_id
            ),
            index,
        )
        found.setdefault(first, []).append(index)
    return found


def trained(rollout: Rollout) -> list[int]:
    calls = rollout.calls
    return [
        each
        for each in records(rollout)
        if calls[each].trainable
        and calls[each].finish_reason != "abort"
        and calls[each].response_ids
    ]


def earned(rollout: Rollout) -> dict[int, float]:
    """Of each trained call under `per_call`."""
    found = dict.fromkeys(trained(rollout), 0.0)
    if not any(present(call.reward) for call in rollout.calls):
        return found | dict.fromkeys(list(found)[-1:], final(rollout)[0])
    for first, all_records in records(rollout).items():
        rewards = [rollout.calls[each].reward for each in all_records]
        rewards = [each for each in rewards if present(each)]
        owner = max((each for each in found if each <= first), default=None)
        if rewards and owner is not None:
            found[owner] += rewards[-1]
    return found


def defined(of_group: list[Rollout], credit: str) -> dict[tuple[str, int], float]:
    """The advantage of each trained call: its value minus the group's mean."""
    if credit == "per_call":
        of_calls = {
            (each.rollout_id, call): value
            for each in of_group
            for call, value in earned(each).items()
        }
        values = [*of_calls.values(), *(final(each)[0] for each in of_group if not trained(each))]
        return (
            {key: value - sum(values) / len(values) for key, value in of_calls.items()}
            if len(values) > 1
            else dict.fromkeys(of_calls, 0.0)
        )
    mean = sum(final(each)[0] for each in of_group) / len(of_group)
    found = {}
    for each in of_group:
        for place, call in enumerate(reversed(trained(each))):
            share = {
                "identical": 1.0,
                "last_call": float(place == 0),
                "discounted": DISCOUNT**place,
            }
            found[each.rollout_id, call] = (final(each)[0] - mean) * share[credit]
    return found


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("credit", STRATEGIES)
@given(first=rollouts("A"), second=rollouts("B"))
def test_a_strategy_gives_what_its_definition_says(
    level: str, credit: str, first: Rollout, second: Rollout
) -> None:
    group = [first, second]
    strategy = (
        partial(discounted, discount=DISCOUNT) if credit == "discounted" else STRATEGIES[credit]
    )
    config = configured("grpo", credit=credit, norm_adv_by_std_in_grpo=False)
    expected = defined(group, credit)
    try:
        batch = build([strategy(each) for each in group], level, reward_fillna_value=FILL)
    except EmptyBatchError:
        assert not expected
        return
    assert [(each.reward, each.has_reward) for each in batch.rollouts] == [
        final(each) for each in group
    ]
    found = advantages(batch, config)
    assert {(rollout, call) for rollout, call, _ in found} == set(expected)
    for (rollout, call, _), value in found.items():
        assert value == pytest.approx(expected[rollout, call], abs=1e-6)
