"""Which groups a step takes: bounded staleness, no bias for short rollouts, no deadlock."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_fast.rollouts.group_schedule import GroupSchedule


@dataclass
class Group:
    number: int
    version: int | None
    end: float = 0.0


def test_a_step_takes_the_complete_groups_with_the_least_slack_in_the_order_of_starting():
    schedule = GroupSchedule(n_groups=2, max_staleness=2, oversample=3.0)
    complete = [Group(5, 2), Group(3, 1), Group(4, 2), Group(7, 3)]
    assert schedule.step(complete, [], version=3) == [Group(3, 1), Group(4, 2)]


def test_a_step_waits_for_a_group_that_cannot_be_postponed():
    schedule = GroupSchedule(n_groups=1, max_staleness=1, oversample=2.0)
    old, new = Group(0, 4), Group(1, 5)
    assert schedule.step([new], [old], version=5) is None
    assert schedule.step([new, old], [], version=5) == [old]
    assert schedule.step([new], [Group(0, 5)], version=5) == [new]


def test_a_step_waits_while_too_many_groups_would_be_urgent_later():
    schedule = GroupSchedule(n_groups=2, max_staleness=1, oversample=2.0)
    running = [Group(number, 0) for number in range(3)]
    # The next step trains two groups, and three could not be postponed any more.
    assert schedule.step([Group(3, 0), Group(4, 0)], running, version=0) is None
    assert schedule.step([Group(3, 0), Group(4, 0)], running[:2], version=0) is not None


def test_a_group_without_calls_is_not_stale():
    schedule = GroupSchedule(n_groups=1, max_staleness=1, oversample=2.0)
    assert schedule.slack(Group(0, None), version=9) == 1
    assert schedule.step([Group(1, 9)], [Group(0, None)], version=9) == [Group(1, 9)]


def test_the_last_step_takes_what_is_left():
    schedule = GroupSchedule(n_groups=4, max_staleness=1, oversample=2.0)
    assert schedule.step([Group(0, 1)], [Group(1, 1)], version=1) is None
    assert schedule.step([Group(0, 1), Group(1, 1)], [], version=1) == [Group(0, 1), Group(1, 1)]
    assert schedule.step([], [], version=1) == []


@pytest.mark.parametrize(
    ("version", "next_update", "n_in_flight", "expected"),
    [(3, 3, 0, 6), (3, 3, 5, 1), (3, 4, 0, 4), (3, 4, 5, 0)],
)
def test_groups_start_as_far_as_staleness_can_be_kept(version, next_update, n_in_flight, expected):
    schedule = GroupSchedule(n_groups=4, max_staleness=1, oversample=1.5)
    in_flight = [Group(number, version) for number in range(n_in_flight)]
    assert schedule.n_startable(in_flight, version, next_update) == expected


@settings(max_examples=200, deadline=None)
@given(
    n_groups=st.integers(1, 5),
    max_staleness=st.integers(0, 4),
    oversample=st.floats(1.0, 5.0),
    starts_during_updates=st.booleans(),
    random=st.randoms(use_true_random=False),
)
def test_every_group_is_trained_once_within_the_limit(
    n_groups, max_staleness, oversample, starts_during_updates, random
):
    """A simulated run with long-tailed rollouts: nothing is stale, starved or waits for ever."""
    schedule = GroupSchedule(n_groups, max_staleness, min(oversample, max_staleness + 1))
    starts_during_updates &= max_staleness > 0
    now, in_flight, taken, n_started = 0.0, [], [], 0

    def start(version: int, next_update: int) -> None:
        nonlocal n_started
        for _ in range(schedule.n_startable(in_flight, version, next_update)):
            in_flight.append(Group(n_started, version, now + random.lognormvariate(0, 1.5)))
            n_started += 1

    for version in range(40):
        start(version, version)
        while True:
            complete = [each for each in in_flight if each.end <= now]
            running = [each for each in in_flight if each.end > now]
            step = schedule.step(complete, running, version)
            if step is not None:
                break
            now = min(each.end for each in running)
        assert len(step) == n_groups
        assert max(version - each.version for each in step) <= max_staleness
        in_flight = [each for each in in_flight if each not in step]
        taken += [each.number for each in step]
        if starts_during_updates:
            start(version, version + 1)
        now += 1.0
    assert len(set(taken)) == len(taken)
    # No sample is overtaken by those that start more than max_staleness steps later.
    assert set(range(n_groups * (40 - max_staleness))) <= set(taken) | {
        each.number for each in in_flight if each.version >= 40 - max_staleness
    }
