"""Requests that are strange, hostile or very large."""

from __future__ import annotations

import json

import pytest

import agl_fast
from support.fake_openai_server import Answer
from support.raw_http import chat_body, chat_head, fleet_of, length, raw_request, serving
from support.running_proxy import CHAT, say

MEGABYTE = 1 << 20


@pytest.mark.parametrize("stream", [False, True])
def test_one_request_id_for_a_whole_conversation_makes_no_duplicates(fake, proxy, stream):
    """vLLM would make the response's id of it: two answers, one of them taken for a repetition."""

    def answer(request):
        return Answer(response_id=request.headers.get("X-Request-Id"))

    fake.respond = answer
    for _ in range(2):
        proxy.post(headers={"X-Request-Id": "the-conversation"}, stream=stream)
    assert len(proxy.take()) == 2
    assert all("X-Request-Id" not in request.headers for request in fake.requests)
    assert "duplicates" not in proxy.counts


def test_a_request_sent_twice_is_two_calls(fake, proxy):
    """A client that timed out and asks again: both were sampled, and both answers were given."""
    for _ in range(2):
        proxy.post(headers={"Idempotency-Key": "k", "X-Stainless-Retry-Count": "1"})
    assert len(proxy.take()) == proxy.counts["recorded"] == 2


def test_a_body_of_100_megabytes(fake, proxy):
    text = "x" * (100 * MEGABYTE)
    fake.respond = lambda request: Answer(prompt_token_ids=[1])
    answer = proxy.post(messages=say(text))
    assert answer.status_code == 200
    assert len(fake.bodies()[0]["messages"][0]["content"]) == len(text)
    assert len(proxy.take()) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"\xff\xfe{}",
        b'{"messages": [}',
        b"\x00" * 64,
        b"[" * 200_000,
    ],
)
def test_bodies_that_are_no_request(fake, proxy, body):
    answer = proxy.client.post(proxy.base_url() + CHAT, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert fake.requests == []
    assert proxy.counts == {"bad_requests": 1}
    assert proxy.post().status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": None},
        {"messages": "text"},
        {"messages": [1, "a", None]},
        {"messages": [{"role": "user", "content": [1, None]}]},
        {"n": "many"},
        {"temperature": "hot"},
        {"stop": {"a": 1}},
        {"max_tokens": -1},
        {"model": ["policy"]},
    ],
)
def test_fields_that_make_no_sense_are_left_to_the_server(fake, proxy, fields):
    proxy.train()
    fake.respond = lambda request: Answer(status=400)
    answer = proxy.post(**fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "scripted"
    assert proxy.counts["client_errors"] == 1
    assert proxy.take() == []


@pytest.mark.parametrize(
    "header",
    [
        b"X-Custom: a\r\n X-Injected: 1",  # a folded line
        b"X-Custom: a\rX-Injected: 1",
        b"X-Custom: a\nX-Injected: 1",
        b"X-Custom: a\x00b",
        b"X-Cus tom: a",
        b"X-Custom : a",
        b": a",
    ],
)
def test_headers_that_would_become_others_do_not_pass(fake, proxy, header):
    body = chat_body()
    answer = raw_request(proxy, chat_head(length(body), header), body)
    assert b" 400 " in answer.split(b"\r\n")[0]
    assert fake.requests == []
    assert proxy.post().status_code == 200


def test_smuggled_requests_do_not_pass(fake, proxy):
    """Two lengths of a body: what one reads as the body, another would read as a request."""
    body = chat_body()
    heads = [
        chat_head(length(body), b"Transfer-Encoding: chunked"),
        chat_head(length(body), b"Content-Length: 5"),
    ]
    for head in heads:
        assert b" 400 " in raw_request(proxy, head, body).split(b"\r\n")[0]
    assert fake.requests == []


def test_header_values_beyond_ascii_pass(fake, proxy):
    body = chat_body()
    head = chat_head(length(body), b"X-Custom: caf\xc3\xa9", b"X-Latin: caf\xe9")
    assert raw_request(proxy, head, body).startswith(b"HTTP/1.1 200")
    assert fake.requests[0].headers["X-Custom"] == "café"


def test_line_breaks_in_a_path_are_refused(fake, proxy):
    """They become part of no header, and of nobody else's rollout."""
    path = b"/rollout/ro-1%0d%0aX-Injected:%201/attempt/at-1/v1/chat/completions"
    body = chat_body()
    answer = raw_request(proxy, chat_head(length(body), path=path), body)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"\nX-Injected" not in answer
    assert fake.requests == []
    assert proxy.take() == []


def test_a_name_of_an_agent_with_strange_letters(fake, proxy):
    proxy.post(headers={"X-AGL-Agent": "Schärfe;\tq=1".encode()})
    (recorded,) = proxy.take()
    assert recorded.call.agent == "Schärfe;\tq=1"
    assert "X-AGL-Agent" not in fake.requests[0].headers


EMPTY = {"index": 0, "token_ids": [], "finish_reason": "stop", "logprobs": None}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_with_empty_ids_is_a_call_without_tokens(proxy, stream):
    """Nothing was sampled, which is no fault of the server's: the batch drops it, and says why."""
    body = json.dumps({"id": "chatcmpl-1", "prompt_token_ids": [1, 2], "choices": [EMPTY]}).encode()
    kind = b"application/json"
    if stream:
        body, kind = b"data: " + body + b"\n\ndata: [DONE]\n\n", b"text/event-stream"
    with serving(body, kind) as address:
        proxy.server.fleet = fleet_of(address)
        assert proxy.post(stream=stream).status_code == 200
    (recorded,) = proxy.take()
    rollout = agl_fast.Rollout("r", "d", [recorded.call])
    with pytest.raises(agl_fast.EmptyBatchError) as caught:
        agl_fast.build_batch([rollout], max_prompt_length=4, max_response_length=4, pad_token_id=0)
    assert caught.value.accounting.empty_calls == 1


def test_an_answer_without_choices_fails(proxy):
    with serving(b'{"id": "chatcmpl-1", "prompt_token_ids": [1], "choices": []}') as address:
        proxy.server.fleet = fleet_of(address)
        answer = proxy.post()
    assert answer.status_code == 502
    assert "no choices" in answer.json()["error"]["message"]


def test_a_store_that_fails_fails_the_call(fake, proxy, caplog):
    async def fails(rollout_id: str, attempt_id: str) -> int:
        raise ConnectionError("the database is gone")

    proxy.server.next_sequence = fails
    answer = proxy.post()
    assert answer.status_code == 503
    assert "database is gone" in answer.json()["error"]["message"]
    assert proxy.take() == []
    assert proxy.counts == {"store_errors": 1, "refused_tokens": 3}
    assert "ro-1" in caplog.text


def test_rollouts_that_nobody_enqueued(fake, proxy):
    """Their calls are answered, belong to no other, and are counted when they are forgotten."""
    proxy.post(rollout="ro-unknown")
    assert proxy.take("ro-1") == []
    proxy.server.recorder.forget_all_but()
    assert proxy.counts == {"recorded": 1, "forgotten": 1, "forgotten_tokens": 3}
