"""Calls wait while the servers get new weights, and what was cut off is repeated."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from support.daemon_runs import new_store
from support.fake_openai_server import Answer, FakeOpenAIServer
from support.running_proxy import CHAT, say, wait_until

N_TOKENS = 20


class Weights:
    """Token ids of an answer: the version of the weights when they are sampled."""

    def __init__(self, version: int = 1) -> None:
        self.version = version

    def __len__(self) -> int:
        return N_TOKENS

    def __getitem__(self, index: int) -> int:
        if index >= N_TOKENS:
            raise IndexError(index)
        return self.version


@pytest.fixture
def proxy(fake: FakeOpenAIServer) -> Iterator[Any]:
    from agl_fast.proxy import LLMProxy

    proxy = LLMProxy(model_list=[fake.model_entry()], store=new_store(), timeout_seconds=10.0)
    asyncio.run(proxy.start())
    proxy.policy_version = 1
    proxy.repeatable = True
    proxy.announce(["ro-1", "ro-2"], "train", None)
    proxy.announce(["val-1"], "val", None)
    yield proxy
    asyncio.run(proxy.stop())


@pytest.fixture
def agents() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as pool:
        yield pool


def ask(proxy: Any, rollout: str = "ro-1", **body: Any) -> httpx.Response:
    url = proxy.as_resource().get_base_url(rollout, "at-1") + CHAT
    return httpx.post(url, json={"model": "policy", "messages": say("hi"), **body}, timeout=20.0)


def taken(proxy: Any, rollout: str = "ro-1") -> list[tuple[int | None, list[int]]]:
    calls = [each.call for each in proxy.recorder.take(rollout, "at-1")]
    return [(each.policy_version, sorted(set(each.response_ids.tolist()))) for each in calls]


def text_of(stream: httpx.Response) -> list[str]:
    return [line for line in stream.text.splitlines() if line.startswith("data: ")]


def under_way(proxy: Any) -> int:
    return len(list(proxy._server.flights))


@pytest.mark.parametrize("rollout", ["ro-1", "val-1"])
def test_a_call_in_flight_is_repeated_with_the_new_weights(fake, proxy, agents, rollout):
    weights = Weights()
    fake.respond = lambda request: Answer(token_ids=weights, delay=30.0 * (weights.version == 1))
    answer = agents.submit(ask, proxy, rollout)
    wait_until(lambda: len(fake.requests) == 1)
    asyncio.run(proxy.hold(0.05))
    wait_until(lambda: fake.aborted == 1)
    assert not answer.done()
    weights.version = 2
    asyncio.run(proxy.release(2))
    assert answer.result(10).status_code == 200
    assert taken(proxy, rollout) == [(2, [2])]
    assert len(fake.requests) == 2
    unseen = {"unseen_answers": 1} if rollout == "ro-1" else {}
    assert proxy.recorder.counts == {"recorded": 1, "repeated": 1, **unseen}


def test_calls_in_flight_may_finish(fake, proxy, agents):
    fake.respond = lambda request: Answer(delay=0.2)
    answers = [agents.submit(ask, proxy) for _ in range(4)]
    wait_until(lambda: len(fake.requests) == 4)
    asyncio.run(proxy.hold(10.0))
    assert fake.aborted == 0
    late = agents.submit(ask, proxy)
    wait_until(lambda: under_way(proxy) == 1)
    assert len(fake.requests) == 4
    asyncio.run(proxy.release(2))
    assert {each.result(10).status_code for each in [*answers, late]} == {200}
    assert sorted(version for version, _ in taken(proxy)) == [1, 1, 1, 1, 2]
    assert proxy.recorder.counts == {"recorded": 5}


def test_waiting_at_the_gate_takes_nothing_of_a_call_s_time(fake, proxy, agents):
    proxy._server._timeout_seconds = 0.6
    fake.respond = lambda request: Answer(delay=0.4)
    answer = agents.submit(ask, proxy)
    wait_until(lambda: len(fake.requests) == 1)
    time.sleep(0.3)
    asyncio.run(proxy.hold(0.0))
    time.sleep(0.5)
    asyncio.run(proxy.release(2))
    assert answer.result(10).status_code == 200
    assert proxy.recorder.counts["repeated"] == 1


def test_a_stream_is_repeated_and_its_tokens_are_counted(fake, proxy, agents):
    weights = Weights()
    fake.respond = lambda request: Answer(token_ids=weights, chunk_delay=0.02)
    answer = agents.submit(ask, proxy, stream=True)
    wait_until(lambda: fake.sampled >= 4)
    asyncio.run(proxy.hold(0.0))
    wait_until(lambda: fake.aborted == 1)
    sampled, weights.version = fake.sampled, 2
    asyncio.run(proxy.release(2))
    events = text_of(answer.result(10))
    assert answer.result().status_code == 200
    assert len(events) == N_TOKENS + 2, "the role, the tokens of one answer, and its end"
    assert events[-1] == "data: [DONE]"
    assert taken(proxy) == [(2, [2])]
    counts = proxy.recorder.counts
    assert 1 <= counts["repeated_tokens"] <= sampled
    assert sampled - counts["repeated_tokens"] <= 1, "an event that was under way"
    assert (counts["recorded"], counts["repeated"]) == (1, 1)
    assert "unseen_answers" not in counts


def test_a_stream_that_the_agent_reads_already_is_not_repeated(fake, proxy, agents):
    """Without ``repeatable`` events pass as they come: the hold waits for their end."""
    proxy.repeatable = False
    fake.respond = lambda request: Answer(token_ids=range(N_TOKENS), chunk_delay=0.02)
    answer = agents.submit(ask, proxy, stream=True)
    wait_until(lambda: fake.sampled >= 4)
    asyncio.run(proxy.hold(0.0))
    assert fake.sampled == N_TOKENS
    assert len(text_of(answer.result(10))) == N_TOKENS + 2
    late = agents.submit(ask, proxy)
    asyncio.run(proxy.release(2))
    assert late.result(10).status_code == 200
    assert [version for version, _ in taken(proxy)] == [1, 2]
    assert proxy.recorder.counts == {"recorded": 2, "streams": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_dies_in_the_drain_loses_nothing(proxy, agents, stream):
    with FakeOpenAIServer() as other, FakeOpenAIServer() as dying:
        dying.respond = lambda request: Answer(
            token_ids=range(N_TOKENS), delay=0.0 if stream else 30.0, chunk_delay=0.1
        )
        proxy.update_model_list([dying.model_entry()])
        answers = [agents.submit(ask, proxy, stream=stream) for _ in range(4)]
        wait_until(lambda: len(dying.requests) == 4)
        hold = agents.submit(asyncio.run, proxy.hold(10.0))
        wait_until(lambda: proxy._server.gate.is_held)
        dying.stop()
        hold.result(10)
        proxy.update_model_list([other.model_entry()])
        assert not any(each.done() for each in answers)
        asyncio.run(proxy.release(2))
        assert {each.result(10).status_code for each in answers} == {200}
        assert len(other.requests) == 4
    calls = taken(proxy)
    assert [version for version, _ in calls] == [2] * 4
    counts = proxy.recorder.counts
    assert counts["recorded"] == 4
    assert counts["server_errors"] == 4


def test_the_only_server_is_asked_again_after_a_failure_in_the_drain(fake, proxy, agents):
    def breaks_off(request: Any) -> Answer:
        fake.respond = lambda request: Answer()
        return Answer(delay=1.5, hang_up="midway")  # after the gate has closed

    fake.respond = breaks_off
    answer = agents.submit(ask, proxy)
    wait_until(lambda: len(fake.requests) == 1)
    asyncio.run(proxy.hold(10.0))
    asyncio.run(proxy.release(2))
    assert answer.result(10).status_code == 200
    assert [version for version, _ in taken(proxy)] == [2]


@pytest.mark.parametrize("was_in_flight", [False, True])
def test_a_rollout_that_ends_at_the_gate_is_answered(fake, proxy, agents, was_in_flight):
    fake.respond = lambda request: Answer(delay=30.0)
    if was_in_flight:
        answer = agents.submit(ask, proxy)
        wait_until(lambda: len(fake.requests) == 1)
    asyncio.run(proxy.hold(0.0))
    if not was_in_flight:
        answer = agents.submit(ask, proxy)
        wait_until(lambda: under_way(proxy) == 1)
    other = agents.submit(ask, proxy, "ro-2")
    wait_until(lambda: under_way(proxy) == 2)
    asyncio.run(proxy.close(["ro-1"]))
    assert answer.result(10).status_code == 409
    assert "the rollout has ended" in answer.result().json()["error"]["message"]
    assert ask(proxy).status_code == 404
    assert not other.done()
    fake.respond = lambda request: Answer()
    asyncio.run(proxy.release(2))
    assert other.result(10).status_code == 200


def test_an_agent_that_leaves_at_the_gate(fake, proxy, agents):
    asyncio.run(proxy.hold(0.0))
    url = proxy.as_resource().get_base_url("ro-1", "at-1") + CHAT
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json={"model": "policy", "messages": say("hi")}, timeout=0.2)
    wait_until(lambda: under_way(proxy) == 0)
    asyncio.run(proxy.release(2))
    assert fake.requests == []
    assert proxy.recorder.counts == {"client_gone": 1}


def test_holding_needs_a_proxy_that_runs(fake):
    from agl_fast.proxy import LLMProxy

    with pytest.raises(RuntimeError, match="does not run"):
        asyncio.run(LLMProxy(model_list=[fake.model_entry()]).hold(0.0))


def test_many_agents_and_random_holds(fake, proxy, agents):
    """Every agent gets every answer, and every recorded call has the servers' version."""
    n_agents, n_calls = 50, 8
    weights, chance = Weights(), random.Random(5)
    lock, done = threading.Lock(), threading.Event()

    def answer(request: Any) -> Answer:
        with lock:
            delay = chance.expovariate(30.0)
        return Answer(token_ids=weights, delay=delay, chunk_delay=delay / 20)

    def agent(index: int) -> list[int]:
        url = proxy.as_resource().get_base_url(f"agent-{index}", "at-1") + CHAT
        statuses = []
        with httpx.Client(timeout=30.0) as client:
            for call in range(n_calls):
                body = {"model": "policy", "messages": say(f"{index} {call}")}
                reply = client.post(url, json={**body, "stream": (index + call) % 2 == 0})
                statuses.append(reply.status_code)
                if (index + call) % 2 == 0:
                    assert len(text_of(reply)) == N_TOKENS + 2
        return statuses

    def trainer() -> None:
        waits = random.Random(6)
        while not done.is_set():
            asyncio.run(proxy.hold(waits.uniform(0.0, 0.03)))
            weights.version += 1
            asyncio.run(proxy.release(weights.version))
            time.sleep(waits.uniform(0.0, 0.1))

    fake.respond = answer
    rollouts = [f"agent-{index}" for index in range(n_agents)]
    proxy.announce(rollouts, "train", None)
    training: Future[None] = agents.submit(trainer)
    statuses = list(agents.map(agent, range(n_agents)))
    done.set()
    training.result(20)
    assert statuses == [[200] * n_calls] * n_agents
    calls = [call for rollout in rollouts for call in taken(proxy, rollout)]
    assert len(calls) == n_agents * n_calls
    assert [ids for _, ids in calls] == [[version] for version, _ in calls]
    assert len({version for version, _ in calls}) > 2
    counts = proxy.recorder.counts
    known = {"recorded", "repeated", "repeated_tokens", "unseen_answers", "streams"}
    assert counts.keys() <= known, "nothing else is lost"
    assert counts["recorded"] == n_agents * n_calls
    assert counts["repeated"] > 0
    # A server tells nothing of an answer that was cut off before its first event.
    seen = counts["recorded"] * N_TOKENS + counts.get("repeated_tokens", 0)
    assert seen <= fake.sampled <= seen + counts["repeated"] * N_TOKENS
