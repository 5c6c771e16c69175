"""A server of several that fails: what agents notice, and when it is used again."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import httpx
import openai
import pytest

from agl_fast.proxy import fleet, health
from agl_fast.proxy.fleet import FAILURES_IN_A_ROW, FIRST_REST_SECONDS, Fleet, NoServerError
from support.fake_openai_server import Answer, FakeOpenAIServer, Request
from support.running_proxy import RunningProxy, running_proxy, say, wait_until

ROLLOUTS = 24


@contextmanager
def three_servers(**settings: float) -> Iterator[tuple[list[FakeOpenAIServer], RunningProxy]]:
    with ExitStack() as stack:
        fakes = [stack.enter_context(FakeOpenAIServer()) for _ in range(3)]
        for fake in fakes:
            fake.respond = lambda request: Answer(delay=0.01)
        yield fakes, stack.enter_context(running_proxy(*fakes, **settings))


def run_rollouts(proxy: RunningProxy, n: int = ROLLOUTS, *, retries: int = 2) -> Counter[str]:
    """Two calls each, eight rollouts at a time, with the openai client; how they ended."""

    async def rollout(index: int, client: openai.AsyncOpenAI, limit: asyncio.Semaphore) -> str:
        async with limit:
            own = client.with_options(base_url=proxy.base_url(f"ro-{index}"))
            try:
                for turn in range(2):
                    messages = say(f"{index}.{turn}")
                    await own.chat.completions.create(model="policy", messages=messages)
            except openai.APIError as error:
                return type(error).__name__
        return "ok"

    async def rollouts() -> Counter[str]:
        limit = asyncio.Semaphore(8)
        async with openai.AsyncOpenAI(api_key="any", max_retries=retries, timeout=10.0) as client:
            return Counter(await asyncio.gather(*(rollout(i, client, limit) for i in range(n))))

    return asyncio.run(rollouts())


BAD = {
    "500": Answer(status=500),
    "502": Answer(status=502),
    "503": Answer(status=503),
    "404": Answer(status=404),
    "without ids": Answer(without=frozenset({"token_ids"})),
    "hangs up": Answer(hang_up="before"),
    "breaks off": Answer(hang_up="midway"),
}


@pytest.mark.parametrize("kind", BAD)
def test_one_bad_server_of_three_costs_no_rollout(kind, monkeypatch):
    """It answers faster than the others, and still attracts no load."""
    monkeypatch.setattr(fleet, "FIRST_REST_SECONDS", 600.0)
    monkeypatch.setattr(fleet, "LONGEST_REST_SECONDS", 600.0)
    with three_servers() as (fakes, proxy):
        fakes[0].respond = lambda request: BAD[kind]
        assert run_rollouts(proxy, retries=0) == {"ok": ROLLOUTS}
        counts = proxy.counts
        assert counts["moved"] <= 2 * ROLLOUTS / 3, "one that fails fast would get every rollout"
        assert counts["recorded"] == 2 * ROLLOUTS
        failed = counts.get("server_errors", 0) + counts.get("without_token_ids", 0)
        assert counts["moved"] == failed


def test_a_server_that_refuses_connections_costs_no_rollout():
    with three_servers() as (fakes, proxy):
        fakes[0].stop()
        assert run_rollouts(proxy, retries=0) == {"ok": ROLLOUTS}


def test_a_server_that_accepts_no_connection_costs_no_rollout():
    """Its queue of connections is full, as that of a machine that swaps."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as stack:
        address = full.getsockname()
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        good = stack.enter_context(FakeOpenAIServer())
        entry = good.model_entry()
        deaf = {
            **entry,
            "litellm_params": {
                **entry["litellm_params"],
                "api_base": f"http://127.0.0.1:{address[1]}/v1/",
            },
        }
        proxy = stack.enter_context(running_proxy(good, move_after_seconds=0.5))
        proxy.server.fleet = Fleet([deaf, entry])
        assert run_rollouts(proxy, 8, retries=0) == {"ok": 8}
        assert proxy.counts["moved"] >= 1


def test_streams_that_fail_before_the_first_byte_move():
    with three_servers() as (fakes, proxy):
        fakes[0].respond = lambda request: Answer(without=frozenset({"prompt_token_ids"}))
        fakes[1].respond = lambda request: Answer(status=503)
        for index in range(6):
            assert proxy.post(rollout=f"ro-{index}", stream=True).status_code == 200
            assert len(proxy.take(f"ro-{index}")) == 1


def test_all_servers_bad_is_an_honest_error():
    with three_servers() as (fakes, proxy):
        for fake in fakes:
            fake.respond = lambda request: Answer(status=503)
        for index in range(12):
            assert proxy.post(rollout=f"ro-{index}").status_code == 503
        for fake in fakes:
            fake.stop()
        answer = proxy.post()
        assert answer.status_code == 502
        assert "cannot be reached" in answer.json()["error"]["message"]
        # They are asked again at once: what fails here is lost nowhere else.
        with FakeOpenAIServer(port=fakes[0].port):
            wait_until(lambda: proxy.post().status_code == 200)


def test_a_server_that_works_again_is_used_again(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(fleet, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(fleet, "AFTER_FAILURE_SECONDS", 0.0)
    with three_servers() as (fakes, proxy):
        fakes[0].respond = lambda request: Answer(status=500)
        for index in range(12):
            assert proxy.post(rollout=f"bad-{index}").status_code == 200
        asked = len(fakes[0].requests)
        assert asked == FAILURES_IN_A_ROW
        assert not proxy.server.fleet.servers[0].is_in_rotation
        now[0] += FIRST_REST_SECONDS
        assert proxy.post(rollout="probe").status_code == 200  # on another one, after the probe
        assert proxy.post(rollout="next").status_code == 200
        assert len(fakes[0].requests) == asked + 1, "one probe, and a longer rest"
        now[0] += FIRST_REST_SECONDS
        assert proxy.post(rollout="later").status_code == 200
        assert len(fakes[0].requests) == asked + 1
        fakes[0].respond = lambda request: Answer()
        now[0] += FIRST_REST_SECONDS
        for index in range(12):
            assert proxy.post(rollout=f"good-{index}").status_code == 200
        assert len(fakes[0].requests) > asked + 3
        assert proxy.server.fleet.servers[0].is_in_rotation


def test_a_single_failure_takes_no_server_out_of_rotation():
    with three_servers() as (fakes, proxy):
        for _ in range(3):
            fakes[0].answer_next(Answer(status=500))
            for index in range(6):
                proxy.server.fleet.forget([f"ro-{i}" for i in range(8)])
                assert proxy.post(rollout=f"ro-{index}").status_code == 200
        assert "servers_out" not in proxy.counts


@pytest.mark.parametrize("status", [400, 413, 422, 429, 500])
def test_a_request_that_fails_everywhere_blames_no_server(status):
    def answer(request: Request) -> Answer:
        bad = "bad" in str(request.body.get("messages"))
        return Answer(status=status) if bad else Answer()

    with three_servers() as (fakes, proxy):
        for fake in fakes:
            fake.respond = answer
        for index in range(20):
            assert proxy.post(rollout=f"ro-{index}", messages=say("bad")).status_code == status
        assert all(server.is_in_rotation for server in proxy.server.fleet.servers)
        assert "servers_out" not in proxy.counts
        n_asked = sum(len(fake.requests) for fake in fakes)
        assert n_asked == (20 if status < 500 else 60)


def test_a_request_that_kills_servers_leaves_the_fleet_alive():
    """Two are enough evidence; what it broke and what answers since is no evidence."""
    with three_servers() as (fakes, proxy):

        def kill(fake: FakeOpenAIServer):
            def respond(request: Request) -> Answer:
                if "poison" not in str(request.body["messages"]):
                    return Answer()
                threading.Thread(target=fake.stop).start()
                return Answer(delay=30)

            return respond

        for fake in fakes:
            fake.respond = kill(fake)
        for rollout in ("ro-1", "ro-1", "ro-2", "ro-3"):
            answer = proxy.post(rollout=rollout, messages=say("poison"))
            assert answer.status_code == 502
        assert "one after another" in answer.json()["error"]["message"]
        assert proxy.counts["dangerous"] == 4
        assert proxy.post(rollout="ro-4").status_code == 200


def test_a_rollout_stays_where_it_moved_to():
    with three_servers() as (fakes, proxy):
        proxy.post()
        (home,) = [fake for fake in fakes if fake.requests]
        home.answer_next(Answer(status=500))
        for _ in range(4):
            assert proxy.post().status_code == 200
        assert sorted(len(fake.requests) for fake in fakes) == [0, 2, 4]
        assert len(proxy.take()) == 5


@contextmanager
def frozen_server() -> Iterator[FakeOpenAIServer]:
    """Accepts connections and requests, and answers nothing, as a process that was stopped."""
    with FakeOpenAIServer() as fake:
        fake.respond = lambda request: Answer(delay=60)
        fake.is_frozen = True
        yield fake


@pytest.fixture
def look_often(monkeypatch):
    monkeypatch.setattr(health, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(health, "QUIET_SECONDS", 0.3)
    monkeypatch.setattr(health, "ANSWER_SECONDS", 1.0)


def test_requests_to_a_frozen_server_move(look_often):
    with (
        frozen_server() as frozen,
        FakeOpenAIServer() as good,
        running_proxy(frozen, good, move_after_seconds=0.5) as proxy,
    ):
        assert run_rollouts(proxy, 8, retries=0) == {"ok": 8}
        assert proxy.counts["servers_out"] >= 1
        assert proxy.counts["moved"] >= 1
        wait_until(lambda: frozen.aborted >= 1)
        n_requests = len(frozen.requests)
        assert run_rollouts(proxy, 8, retries=0) == {"ok": 8}
        assert len(frozen.requests) == n_requests
        frozen.is_frozen = False
        frozen.respond = lambda request: Answer()
        wait_until(lambda: proxy.server.fleet.servers[0].is_in_rotation)
        proxy.server.fleet.forget([f"ro-{i}" for i in range(8)])  # a new step
        run_rollouts(proxy, 8)
        assert len(frozen.requests) > n_requests


def test_an_agent_that_times_out_gets_another_server_the_next_time(look_often):
    """The proxy need not know yet that the server is frozen."""
    with (
        frozen_server() as frozen,
        FakeOpenAIServer() as good,
        running_proxy(frozen, good) as proxy,
    ):
        with openai.OpenAI(base_url=proxy.base_url(), api_key="any", timeout=1.0) as client:
            client.chat.completions.create(model="policy", messages=say("hi"))
        assert [len(frozen.requests), len(good.requests)] == [1, 1]


def test_a_slow_server_that_is_healthy_keeps_its_requests(look_often):
    with FakeOpenAIServer() as slow, FakeOpenAIServer() as other:
        slow.respond = lambda request: Answer(delay=2.0)
        with running_proxy(slow, other, move_after_seconds=0.5) as proxy:
            assert proxy.post().status_code == 200
            assert len(slow.requests) == 1
            assert proxy.counts == {"recorded": 1}


def test_tries_end_with_the_time_limit():
    """Three servers do not triple it."""
    with three_servers(timeout_seconds=1.0) as (fakes, proxy):
        for fake in fakes:
            fake.respond = lambda request: Answer(delay=0.4, status=500)
        begin = time.monotonic()
        with httpx.Client(timeout=10.0) as client:
            answer = client.post(
                proxy.base_url() + "/chat/completions",
                json={"model": "policy", "messages": say("hi")},
            )
        assert answer.status_code == 504
        assert time.monotonic() - begin < 5


def test_one_probe_at_a_time():
    entries = [
        {"model_name": "policy", "litellm_params": {"api_base": f"http://{name}/v1"}}
        for name in ("one", "two")
    ]
    servers = Fleet(entries)
    one, two = servers.servers
    for _ in range(FAILURES_IN_A_ROW):
        servers.failed(one, None, "500")
    one.rests_until = 0.0
    with servers.server_for("a").busy():
        assert one.is_probed
        assert servers.server_for("b") is two
    assert servers.server_for("c") is one, "the probe ended without a verdict"
    with pytest.raises(NoServerError, match="no other server"):
        servers.server_for("d", [one, two])
