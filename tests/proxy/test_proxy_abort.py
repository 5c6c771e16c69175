"""Requests of rollouts that have ended end at the server, too: it neither samples for nobody, nor
waits for them before it sleeps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from support.daemon_runs import HELLO, agentlightning, daemon_bench, new_store
from support.fake_openai_server import Answer, FakeOpenAIServer, Request
from support.running_proxy import CHAT, say, wait_until


@pytest.fixture
def fake():
    with FakeOpenAIServer() as server:
        server.respond = lambda request: Answer(delay=0.0 if is_quick(request) else 30.0)
        yield server


def is_quick(request: Request) -> bool:
    return "quick" in str(request.body.get("messages"))


@pytest.fixture
def store():
    return new_store()


@pytest.fixture
def proxy(fake, store):
    from agl_fast.proxy import LLMProxy

    proxy = LLMProxy(model_list=[fake.model_entry()], store=store)
    asyncio.run(proxy.start())
    proxy.policy_version = 1
    proxy.announce(["ro-1", "ro-2", "ro-3"], "train", None)
    yield proxy
    asyncio.run(proxy.stop())


@contextmanager
def asking(proxy, *ids: str, text: str = "slow", **body: object) -> Iterator[list[httpx.Response]]:
    """One request on a thread; the answer is there when the block has ended."""
    answers: list[httpx.Response] = []
    url = proxy.as_resource().get_base_url(*ids) + CHAT

    def ask() -> None:
        answers.append(
            httpx.post(url, json={"model": "policy", "messages": say(text), **body}, timeout=20.0)
        )

    thread = threading.Thread(target=ask)
    thread.start()
    yield answers
    thread.join(20)


def ask(proxy, *ids: str, text: str = "quick") -> httpx.Response:
    with asking(proxy, *ids, text=text) as answers:
        pass
    return answers[0]


def test_the_requests_of_a_rollout_are_aborted_at_the_server(fake, proxy):
    with asking(proxy, "ro-1", "at-1") as answers:
        wait_until(lambda: len(fake.requests) == 1)
        with asking(proxy, "ro-2", "at-1", text="other") as others:
            wait_until(lambda: len(fake.requests) == 2)
            asyncio.run(proxy.abort("ro-1"))
            wait_until(lambda: fake.aborted == 1)
            assert proxy.recorder.counts == {"aborted": 1, "unseen_answers": 1}
            assert not others
            asyncio.run(proxy.abort("ro-2"))
    assert answers[0].status_code == 409
    assert "'ro-1' has ended" in answers[0].json()["error"]["message"]
    assert ask(proxy, "ro-3", "at-1").status_code == 200


def test_a_stream_is_cut_off(fake, proxy):
    fake.respond = lambda request: Answer(token_ids=range(500), chunk_delay=0.02)
    url = proxy.as_resource().get_base_url("ro-1", "at-1") + CHAT
    body = {"model": "policy", "messages": say("hi"), "stream": True}
    with httpx.stream("POST", url, json=body, timeout=20.0) as answer:
        lines = answer.iter_lines()
        next(lines)
        asyncio.run(proxy.abort("ro-1"))
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    wait_until(lambda: fake.aborted == 1)
    assert proxy.recorder.take("ro-1", "at-1") == []
    n_tokens = proxy.recorder.counts["aborted_tokens"]
    assert 1 <= n_tokens <= fake.sampled
    assert proxy.recorder.counts == {"streams": 1, "aborted": 1, "aborted_tokens": n_tokens}


@pytest.mark.parametrize("is_sent", [True, False])
def test_what_is_not_known_of_an_aborted_request_is_counted(fake, proxy, is_sent):
    """Nothing is unknown of a request that no server has got."""
    proxy._server.fleet.servers[0].url = fake.url if is_sent else "http://127.0.0.1:9"
    with asking(proxy, "ro-1", "at-1") as answers:
        if is_sent:
            wait_until(lambda: len(fake.requests) == 1)
            asyncio.run(proxy.abort("ro-1"))
    assert answers[0].status_code == (409 if is_sent else 502)
    assert proxy.recorder.counts.get("unseen_answers", 0) == is_sent


def test_an_attempt_is_aborted_alone(fake, proxy):
    with asking(proxy, "ro-1", "at-1") as first:
        wait_until(lambda: len(fake.requests) == 1)
        asyncio.run(proxy.abort("ro-1", "at-2"))
        assert fake.aborted == 0
        asyncio.run(proxy.abort("ro-1", "at-1"))
    assert first[0].status_code == 409


def test_a_new_attempt_ends_the_requests_of_the_one_before(fake, proxy, store):
    """The store retries an attempt that it takes for dead, and only the latest one counts."""

    async def two_attempts() -> tuple[str, str, str]:
        rollout = await store.start_rollout({"question": "q"})
        again = await store.start_attempt(rollout.rollout_id)
        return rollout.rollout_id, rollout.attempt.attempt_id, again.attempt.attempt_id

    rollout_id, first, second = asyncio.run(two_attempts())
    proxy.announce([rollout_id], "train", None)
    with asking(proxy, rollout_id, first) as answers:
        wait_until(lambda: len(fake.requests) == 1)
        assert ask(proxy, rollout_id, second).status_code == 200
    assert answers[0].status_code == 409
    assert f"replaced by {second!r}" in answers[0].json()["error"]["message"]
    assert len(proxy.recorder.take(rollout_id, second)) == 1


def test_while_servers_sleep_nothing_reaches_them(fake, proxy):
    with asking(proxy, "ro-1", "at-1") as answers:
        wait_until(lambda: len(fake.requests) == 1)
        asyncio.run(proxy.pause())
        assert fake.aborted == 1, "its connection is closed when pause returns"
    assert answers[0].status_code == 409
    late = ask(proxy, "ro-1", "at-1")
    assert late.status_code == 503
    assert "sleep" in late.json()["error"]["message"]
    assert len(fake.requests) == 1
    counts = {"aborted": 1, "unseen_answers": 1, "refused_while_paused": 1}
    assert proxy.recorder.counts == counts
    proxy.resume()
    assert ask(proxy, "ro-1", "at-1").status_code == 200


def test_an_answer_that_is_complete_is_recorded_although_its_rollout_ends(fake, proxy, store):
    """Its tokens were sampled: they are counted with the rollout's."""
    numbers = store.get_next_span_sequence_id
    entered, leave = threading.Event(), threading.Event()

    async def slow(rollout_id: str, attempt_id: str) -> int:
        entered.set()
        await asyncio.to_thread(leave.wait, 10)
        return await numbers(rollout_id, attempt_id)

    proxy._server.next_sequence = slow
    with asking(proxy, "ro-1", "at-1", text="quick") as answers:
        assert entered.wait(10)
        abort = threading.Thread(target=lambda: asyncio.run(proxy.abort("ro-1")))
        abort.start()
        leave.set()
        abort.join(10)
    assert answers[0].status_code == 200
    assert len(proxy.recorder.take("ro-1", "at-1")) == 1


def test_a_rollout_that_ends_leaves_no_request(fake):
    """Agents that return while a call of theirs is under way, and ones past their deadline."""

    def leaves_a_call(run) -> float:
        run.ask("quick")
        url = run.llm.get_base_url(run.rollout.rollout_id, run.attempt_id) + CHAT
        body = {"model": run.llm.model, "messages": say("slow")}
        threads.append(threading.Thread(target=lambda: httpx.post(url, json=body, timeout=20)))
        threads[-1].start()
        wait_until(lambda: sum(not is_quick(each) for each in bench.fake.requests) >= len(threads))
        return 1.0

    threads: list[threading.Thread] = []
    with daemon_bench(train_rollout_n=1) as bench:
        bench.fake.respond = lambda request: Answer(
            token_ids=HELLO, delay=0.0 if is_quick(request) else 30.0
        )
        _, metrics = bench.train(leaves_a_call, 2, runners=1)
        assert bench.fake.aborted == 2
        assert metrics["training/proxy/aborted"] == 2
        assert metrics["training/tokens/sampled"] == 2 * len(HELLO)
        for thread in threads:
            thread.join(10)


def test_a_daemon_that_clears_lets_nothing_through(fake):
    with daemon_bench() as bench:
        bench.train(lambda run: bool(run.ask("quick")) and 1.0, 1)
        proxy = bench.daemon.llm_proxy
        resource = proxy.as_resource()
        body = {"model": "policy", "messages": say("late")}
        bench.daemon.clear_data_and_server()
        n_requests = len(bench.fake.requests)
        late = resource.get_base_url("late", "at-1") + CHAT
        assert httpx.post(late, json=body).status_code == 404
        of_no_rollout = resource.endpoint + "/v1" + CHAT
        assert httpx.post(of_no_rollout, json=body).status_code == 503
        assert len(bench.fake.requests) == n_requests
    assert isinstance(resource, agentlightning.ProxyLLM)
