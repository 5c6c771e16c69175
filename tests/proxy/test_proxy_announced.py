"""Phase and sampling belong to announced rollouts, the policy version to each call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from agl_fast.proxy.sampling import Phase
from support.fake_openai_server import Answer, FakeOpenAIServer
from support.running_proxy import POLICY, RunningProxy, running_proxy, wait_until

TRAIN, VALIDATION = Phase("train", POLICY), Phase("val", replace(POLICY, temperature=0.0))


@pytest.fixture
def proxy(fake: FakeOpenAIServer) -> Iterator[RunningProxy]:
    with running_proxy(fake) as running:
        running.server.announced.others = None
        running.server.policy_version = 3
        yield running


def open_both(proxy: RunningProxy) -> None:
    proxy.server.announced.announce(["train-1", "train-2"], TRAIN, 3)
    proxy.server.announced.announce(["val-1"], VALIDATION, 3)


def test_two_phases_that_are_open_at_once_do_not_mix(fake, proxy):
    open_both(proxy)
    with ThreadPoolExecutor(8) as agents:
        ids = ["train-1", "val-1", "train-2", "val-1"] * 4
        answers = list(
            agents.map(lambda each: proxy.post(rollout=each, user=each, temperature=0.7), ids)
        )
    assert {each.status_code for each in answers} == {200}
    asked = {(body["user"], body["temperature"]) for body in fake.bodies()}
    # Training replaces what agents ask for; a validation does not.
    assert asked == {("train-1", 1.0), ("train-2", 1.0), ("val-1", 0.7)}
    counts = proxy.server.recorder.reset_counts_by_phase()
    assert {name: +count for name, count in counts.items() if +count} == {
        "train": {
            "recorded": 8,
            "sampling_overridden": 8,
            "sampling_overridden.temperature": 8,
        },
        "val": {"recorded": 8},
    }
    assert [len(proxy.take(each)) for each in ("train-1", "val-1", "train-2")] == [4, 8, 4]


def test_lost_tokens_count_in_training_alone(proxy):
    open_both(proxy)
    for rollout in ("train-1", "val-1"):
        proxy.post(rollout=rollout)
        proxy.server.recorder.discard(rollout)
        proxy.post(rollout=rollout)
    counts = proxy.server.recorder.reset_counts_by_phase()
    lost = {"discarded": 1, "late": 1}
    assert +counts["val"] == {"recorded": 1, **lost}
    assert +counts["train"] == {"recorded": 1, **lost, "discarded_tokens": 3, "late_tokens": 3}


def test_unknown_and_closed_rollouts_are_refused_and_counted(fake, proxy):
    open_both(proxy)
    assert proxy.post(rollout="ro-x").status_code == 404
    proxy.post(rollout="train-1")
    proxy.post(rollout="val-1")
    proxy.server.announced.refuse(["train-1"])
    assert proxy.post(rollout="train-1").status_code == 404
    proxy.server.forget(["train-1", "train-2"])
    for rollout in ("train-1", "train-2"):
        refused = proxy.post(rollout=rollout)
        assert refused.status_code == 404
        assert f"rollout {rollout!r} is in no batch" in refused.json()["error"]["message"]
    assert len(fake.requests) == 2
    assert proxy.counts == {
        "recorded": 2,
        "unknown_rollouts": 4,
        "forgotten": 1,
        "forgotten_tokens": 3,
    }
    assert len(proxy.take("val-1")) == 1, "another batch ended, and this one's calls stay"
    assert proxy.post(rollout="val-1").status_code == 200
    assert proxy.server.fleet.servers[0].rollouts == 1


def test_what_is_answered_after_its_rollout_was_closed_is_late(proxy):
    open_both(proxy)
    entered, leave = threading.Event(), threading.Event()

    async def slow(rollout_id: str, attempt_id: str) -> int:
        entered.set()
        while not leave.is_set():
            await asyncio.sleep(0.01)
        return 1

    proxy.server.next_sequence = slow
    with ThreadPoolExecutor(1) as agent:
        answer = agent.submit(proxy.post, rollout="train-1")
        assert entered.wait(10)
        proxy.server.forget(["train-1"])
        leave.set()
        assert answer.result(10).status_code == 200
    assert proxy.counts == {"late": 1, "late_tokens": 3}
    assert proxy.take("train-1") == []


def test_calls_wait_for_an_announcement_that_is_under_way(fake, proxy):
    with ThreadPoolExecutor(2) as agents:
        with proxy.server.announced.announcing():
            known, unknown = (agents.submit(proxy.post, rollout=each) for each in ("a", "b"))
            wait_until(lambda: len(list(proxy.server.flights)) == 2)
            assert fake.requests == []
            proxy.server.announced.announce(["a"], TRAIN, 3)
        assert known.result(10).status_code == 200
        assert unknown.result(10).status_code == 404
    assert proxy.counts == {"recorded": 1, "unknown_rollouts": 1}


def test_each_call_has_the_version_with_which_it_was_sent(fake, proxy):
    """One that moves to another server has the version of the second request."""
    open_both(proxy)
    proxy.post(rollout="train-1")
    proxy.server.policy_version = 4

    def fails_before_the_sync(_: object) -> Answer:
        proxy.server.policy_version = 5
        fake.respond = lambda request: Answer()
        return Answer(status=500)

    proxy.post(rollout="train-1")
    with FakeOpenAIServer() as other:
        other.respond = fails_before_the_sync
        proxy.serve_from(other, fake)
        assert proxy.post(rollout="train-1").status_code == 200
    assert proxy.counts["moved"] == 1
    assert [each.call.policy_version for each in proxy.take("train-1")] == [3, 4, 5]
    (rollout,) = proxy.server.announced.of(["train-1"])
    assert rollout.policy_version == 3
