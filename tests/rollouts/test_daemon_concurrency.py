"""Rollouts and calls in flight, and the notice where runners starve the servers."""

from __future__ import annotations

import math
import time

import pytest

from agl_fast.rollouts.finished import FinishedRollout
from agl_fast.rollouts.rollout_metrics import CALLS_PER_SERVER, Concurrency, concurrency
from support.daemon_runs import HELLO, daemon_bench
from support.fake_openai_server import Answer


def ran(queued: float | None, seconds: float | None, in_calls: float = 0.0) -> FinishedRollout:
    return FinishedRollout(
        "r",
        "g",
        [],
        None,
        "succeeded",
        {},
        queue_seconds=queued,
        seconds=seconds,
        call_seconds=in_calls,
    )


def test_two_runners_of_ten_rollouts():
    """Two at once, each 4 s of which 3 in calls; the others wait."""
    outcomes = [ran(4.0 * (n // 2), 4.0, 3.0) for n in range(10)]
    measured = concurrency(outcomes, n_servers=2)
    assert measured == Concurrency(10, 2, 2, 0.75, has_waited=True)
    assert measured.metrics == {
        "training/concurrency/rollouts_in_flight": 2.0,
        "training/concurrency/call_share": 0.75,
        "training/concurrency/calls_per_server": 0.75,
    }
    assert "at most 2 of 10 rollouts" in measured.notice
    assert "about 10 rollouts in flight" in measured.notice  # there are no more


def test_the_number_of_runners_follows_the_share_of_calls():
    """Agents that spend a quarter of their time in calls need four times as many runners."""
    measured = Concurrency(10_000, 4, 8, 0.25, has_waited=True)
    assert f"about {4 * CALLS_PER_SERVER * 4} rollouts in flight" in measured.notice


@pytest.mark.parametrize(
    "measured",
    [
        Concurrency(64, 1, 2, 0.5, has_waited=False),  # nobody waited
        Concurrency(64, 1, 40, 0.5, has_waited=True),  # 20 calls a server
        Concurrency(2, 1, 2, 0.5, has_waited=True),  # there are no more rollouts
        Concurrency(64, 1, 2, 0.0, has_waited=True),  # agents without calls
        Concurrency(0, 1, 0, math.nan, has_waited=False),
    ],
)
def test_no_notice(measured):
    assert measured.notice is None


def test_rollouts_that_never_began():
    measured = concurrency([ran(None, None)], n_servers=0)
    assert measured.rollouts_in_flight == 0
    assert math.isnan(measured.call_share)
    assert measured.metrics == {"training/concurrency/rollouts_in_flight": 0.0}


def test_a_step_with_one_runner(caplog):
    """Half of a rollout's time is a call; 6 rollouts, one at a time. Said once, not each step."""

    def agent(run) -> float:
        run.ask("a")
        time.sleep(0.1)
        return 1.0

    with daemon_bench(train_rollout_n=1) as bench:
        bench.fake.respond = lambda _: Answer(text="hello", token_ids=HELLO, delay=0.1)
        _, metrics = bench.train(agent, 6, runners=1)
        bench.train(agent, 6, runners=1)
    assert metrics["training/concurrency/rollouts_in_flight"] == 1
    assert 0.2 < metrics["training/concurrency/call_share"] < 0.8
    assert caplog.text.count("The runners starve the servers: at most 1 of 6") == 1
