"""What becomes of a call when the agent, the server or the network fails."""

from __future__ import annotations

import asyncio
import socket
import threading

import httpx
import openai
import pytest

from agl_fast.proxy.fleet import Fleet
from support.fake_openai_server import Answer, FakeOpenAIServer
from support.running_proxy import CHAT, running_proxy, say, wait_until


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "counted"), [(400, "client_errors"), (429, "client_errors"), (500, "server_errors")]
)
def test_errors_of_the_server_pass_through(fake, proxy, status, counted, stream):
    fake.answer_next(Answer(status=status, headers={"Retry-After": "7"}))
    answer = proxy.post(stream=stream)
    assert answer.status_code == status
    assert answer.json()["error"] == {"message": "scripted", "type": "Scripted", "code": status}
    assert answer.headers["Retry-After"] == "7"
    counts = {counted: 1, "unseen_answers": 1} if status == 500 else {counted: 1}
    assert proxy.counts == counts
    assert len(fake.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/completions"])
@pytest.mark.parametrize("missing", ["prompt_token_ids", "token_ids"])
def test_answer_without_ids_fails(fake, proxy, missing, path, stream, caplog):
    fake.answer_next(Answer(without=frozenset({missing}), chunk_delay=0.05))
    answer = proxy.post(path, stream=stream)
    assert answer.status_code == 502
    assert "return_token_ids" in answer.json()["error"]["message"]
    assert proxy.take() == []
    assert proxy.counts["without_token_ids"] == 1
    assert "return_token_ids" in caplog.text


def test_unreadable_ids_fail(fake, proxy):
    fake.answer_next(Answer(token_ids=[1, -2]))
    answer = proxy.post()
    assert answer.status_code == 502
    assert "return_token_ids" not in answer.json()["error"]["message"]
    assert proxy.counts == {
        "refused_answers": 1,
        "refused_answers.token_ids": 1,
        "refused_tokens": 2,
    }


@pytest.mark.parametrize("path", ["/messages", "/responses"])
@pytest.mark.parametrize("rollout", ["ro-1", None])
def test_endpoints_without_ids_are_refused(fake, proxy, path, rollout):
    answer = proxy.client.post(proxy.base_url(rollout) + path, json={})
    assert answer.status_code == 501
    assert "/v1/chat/completions" in answer.json()["error"]["message"]
    assert fake.requests == []
    assert proxy.counts == {"not_supported": 1}


def test_unknown_path_and_bad_body(fake, proxy):
    assert proxy.client.get(proxy.base_url() + CHAT).status_code == 404
    assert proxy.client.post(proxy.base_url() + "/embeddings", json={}).status_code == 404
    assert proxy.client.post(proxy.base_url() + CHAT, content=b"{").status_code == 400
    assert proxy.client.post(proxy.base_url() + CHAT, content=b"[]").status_code == 400
    assert fake.requests == []
    assert proxy.counts == {"bad_requests": 4}


def test_closed_connection_is_tried_again(fake, proxy):
    fake.answer_next(Answer(), Answer(hang_up="before"), Answer())
    assert [proxy.post().status_code for _ in range(2)] == [200, 200]
    assert len(fake.requests) == 3
    assert proxy.counts == {"recorded": 2, "retries": 1}


def test_stale_connections_are_replaced(proxy):
    """A server restarts on its port: every pooled connection is dead."""
    with FakeOpenAIServer() as first:
        proxy.serve_from(first)
        assert proxy.post().status_code == 200
    with FakeOpenAIServer(port=first.port) as second:
        assert proxy.post().status_code == 200
        assert len(second.requests) == 1


def test_server_that_never_answers_is_unreachable(fake, proxy):
    fake.respond = lambda request: Answer(hang_up="before")
    answer = proxy.post()
    assert answer.status_code == 502
    assert fake.url in answer.json()["error"]["message"]
    assert proxy.counts == {"retries": 2, "server_errors": 1, "unseen_answers": 1}


def test_server_that_speaks_something_else(proxy):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        entry = {"api_base": f"http://127.0.0.1:{listener.getsockname()[1]}/v1"}
        proxy.server.fleet = Fleet([{"model_name": "policy", "litellm_params": entry}])

        def babble() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n\r\n")

        threading.Thread(target=babble, daemon=True).start()
        assert proxy.post().status_code == 502
    assert proxy.counts == {"server_errors": 1}


def test_no_server(proxy):
    proxy.serve_from()
    assert proxy.post().status_code == 502
    assert proxy.counts == {"server_errors": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_answer_that_breaks_off_is_not_recorded(fake, proxy, stream):
    fake.respond = lambda request: Answer(hang_up="midway")
    if stream:
        with pytest.raises(httpx.RemoteProtocolError):
            proxy.post(stream=True)
    else:
        assert proxy.post().status_code == 502
    # Something had arrived: no second request.
    assert len(fake.requests) == 1
    assert proxy.take() == []
    assert proxy.counts["server_errors"] == 1


def test_stream_that_just_ends_is_not_taken_for_whole(fake, proxy):
    fake.answer_next(Answer(finish_reason=None))
    with pytest.raises(httpx.RemoteProtocolError):
        proxy.post(stream=True)
    assert proxy.counts == {"streams": 1, "server_errors": 1, "incomplete_tokens": 3}


def test_error_event_of_a_stream_passes_through(fake, proxy):
    fake.answer_next(Answer(error_event=True))
    answer = proxy.post(stream=True)
    assert "engine died" in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
    assert proxy.take() == []
    assert proxy.counts == {"streams": 1, "server_errors": 1, "incomplete_tokens": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_timeout(fake, stream):
    fake.respond = lambda request: Answer(delay=30)
    with running_proxy(fake, timeout_seconds=0.2) as proxy:
        answer = proxy.post(stream=stream)
        assert answer.status_code == 504
        assert proxy.counts == {"timeouts": 1, "unseen_answers": 1}
        wait_until(lambda: fake.aborted == 1)


def test_timeout_within_a_stream(fake):
    fake.respond = lambda request: Answer(chunk_delay=0.8)
    with running_proxy(fake, timeout_seconds=1.0) as proxy:
        with pytest.raises(httpx.RemoteProtocolError):
            proxy.post(stream=True)
        assert proxy.take() == []
        assert proxy.counts == {"streams": 1, "timeouts": 1, "incomplete_tokens": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_agent_that_leaves_is_not_recorded(fake, proxy, stream):
    fake.respond = lambda request: Answer(delay=30)
    with pytest.raises(httpx.ReadTimeout):
        proxy.client.post(
            proxy.base_url() + CHAT,
            json={"model": "policy", "messages": say("hi"), "stream": stream},
            timeout=0.8,
        )
    # The server need not go on with an answer that nobody wants.
    wait_until(lambda: fake.aborted == 1)
    wait_until(lambda: proxy.counts.get("client_gone") == 1)
    assert proxy.take() == []


def test_agent_that_leaves_within_a_stream(fake, proxy):
    fake.respond = lambda request: Answer(token_ids=range(100), chunk_delay=0.02)
    client = openai.OpenAI(base_url=proxy.base_url(), api_key="any", max_retries=0)
    request = {"model": "policy", "messages": say("hi"), "stream": True}
    with client.chat.completions.create(**request) as events:
        next(iter(events))
    wait_until(lambda: proxy.counts.get("client_gone") == 1)
    wait_until(lambda: fake.aborted == 1)
    assert proxy.take() == []
    assert proxy.counts.pop("client_gone_tokens") >= 1
    assert proxy.counts.keys() == {"streams", "client_gone", "client_gone_tokens"}


def test_agent_that_has_the_answer_may_leave(fake, proxy):
    """Some stop reading at the finish reason: the answer is complete, and in use."""
    fake.answer_next(Answer(token_ids=[1]))
    request = {"model": "policy", "messages": say("hi"), "stream": True}
    url = proxy.base_url() + CHAT
    with proxy.client.stream("POST", url, json=request) as answer:
        next(line for line in answer.iter_lines() if '"stop"' in line)
    assert proxy.counts == {"streams": 1, "recorded": 1}
    assert len(proxy.take()) == 1


def test_stop_does_not_wait_for_answers(fake):
    fake.respond = lambda request: Answer(delay=30)
    with running_proxy(fake) as proxy:
        failures: list[httpx.HTTPError] = []

        def ask() -> None:
            try:
                body = {"model": "policy", "messages": say("hi")}
                httpx.post(proxy.base_url() + CHAT, json=body, timeout=20)
            except httpx.HTTPError as error:
                failures.append(error)

        agent = threading.Thread(target=ask)
        agent.start()
        wait_until(lambda: len(fake.requests) == 1)
    agent.join(5)
    assert len(failures) == 1
    assert proxy.counts == {"unseen_answers": 1}
    wait_until(lambda: fake.aborted == 1)


def test_agents_that_leave_close_nobody_else_s_connection(fake, proxy):
    fake.respond = lambda request: Answer(delay=0.2)
    with socket.create_connection(httpx.URL(proxy.url).netloc.decode().split(":")) as half:
        half.sendall(b"POST /rollout/r/attempt/a/v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
    assert proxy.post().status_code == 200


def test_api_key(fake):
    with running_proxy(fake, api_key="geheim-ä") as proxy:
        assert proxy.post().status_code == 401
        assert proxy.post(headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert proxy.post(headers={"X-API-Key": "geheim-ä".encode()}).status_code == 200
        assert proxy.counts == {"recorded": 1, "unauthorized": 2}
        assert "X-API-Key" not in fake.requests[0].headers


def test_a_rollout_stays_on_its_server_and_new_ones_spread():
    with FakeOpenAIServer() as one, FakeOpenAIServer() as two, running_proxy(one, two) as proxy:
        for _ in range(3):
            for rollout in ("ro-1", "ro-2", "ro-3", "ro-4"):
                proxy.post(rollout=rollout)
        for fake in (one, two):
            rollouts = [request.body["messages"] for request in fake.requests]
            assert len(rollouts) == 6
        for rollout in ("ro-1", "ro-2", "ro-3", "ro-4"):
            response_ids = {recorded.response_id for recorded in proxy.take(rollout)}
            assert len(response_ids) == 3


def test_busy_server_gets_no_new_rollout():
    with FakeOpenAIServer() as one, FakeOpenAIServer() as two, running_proxy(one, two) as proxy:
        one.answer_next(Answer(delay=1.5))
        slow = threading.Thread(target=lambda: proxy.post(rollout="slow"))
        slow.start()
        wait_until(lambda: len(one.requests) + len(two.requests) == 1)
        for index in range(4):
            proxy.post(rollout=f"ro-{index}")
        slow.join()
        assert sorted([len(one.requests), len(two.requests)]) == [1, 4]


def test_many_agents_at_once(fake, proxy):
    """64 agents, four calls each, streamed and whole."""

    async def agent(client: httpx.AsyncClient, index: int) -> None:
        url = proxy.base_url(f"ro-{index}") + CHAT
        for turn in range(4):
            body = {"model": "policy", "messages": say(f"{index}.{turn}"), "stream": turn % 2 == 1}
            answer = await client.post(url, json=body)
            assert answer.status_code == 200

    async def agents() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=20.0, limits=limits) as client:
            await asyncio.gather(*(agent(client, index) for index in range(64)))

    fake.respond = lambda request: Answer(delay=0.01)
    asyncio.run(agents())
    assert proxy.counts == {"recorded": 256, "streams": 128}
    for index in range(64):
        calls = [recorded.call for recorded in proxy.take(f"ro-{index}")]
        prompts = ["".join(map(chr, call.prompt_ids)) for call in calls]
        assert prompts == [f"u{index}.{turn}\n" for turn in range(4)]
    assert fake.connections <= 64
