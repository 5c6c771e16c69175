"""Large requests and answers mean what small ones mean, and others go on meanwhile."""

from __future__ import annotations

import gzip
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from agl_fast.proxy import server as server_module
from agl_fast.proxy.answers import AnswerCollector
from support.fake_openai_server import Answer, FakeOpenAIServer
from support.raw_http import chat_head, fleet_of, length, serving
from support.running_proxy import CHAT, RunningProxy, running_proxy, say, wait_until

KIB = 1 << 10
LONG = "x" * 70 * KIB
# A thread of its own takes over from here.
LONGER = "x" * 1100 * KIB


@pytest.fixture
def fake():
    with FakeOpenAIServer() as server:
        server.respond = lambda request: Answer(prompt_token_ids=[1])
        yield server


@pytest.fixture
def proxy(fake):
    with running_proxy(fake) as running:
        running.train()
        yield running


def post_raw(proxy: RunningProxy, raw: bytes, **headers: str) -> httpx.Response:
    url = proxy.base_url() + CHAT
    return proxy.client.post(
        url, content=raw, headers={"Content-Type": "application/json"} | headers
    )


def request_with(more: str, text: str) -> str:
    return f'{{"model": "policy", "messages": [{{"role": "user", "content": "{text}"}}], {more}}}'


@pytest.mark.parametrize("text", ["short", LONG, LONGER], ids=len)
@pytest.mark.parametrize(
    "more",
    [
        '"user": NaN',
        '"user": [Infinity, -Infinity]',
        '"user": 123456789012345678901234567890, "seed": 1.50',
        '"user": 1, "user": {"a": 1, "a": 2}',
        '"user": "\\ud800 \\u0000 \\ud83d\\ude00"',
        '"user": 1e400, "stop": ["\\n"]',
        '"user": "é€😀", "top_p": 0.5',
        '"tools": [{"type": "function", "function": {"name": "f", "strict": true, "a": "é"}}]',
        '"\\u0075ser": 5',
    ],
)
def test_every_value_arrives(fake, proxy, text, more) -> None:
    raw = request_with(more, text)
    assert post_raw(proxy, raw.encode()).status_code == 200
    expected = json.loads(raw)
    if "tools" in expected:
        expected["tools"][0]["function"]["strict"] = False
    (sent,) = fake.bodies()
    got = {name: sent[name] for name in expected if name not in ("top_p", "messages")}
    assert repr(got) == repr({name: expected[name] for name in got})
    assert sent["messages"] == expected["messages"]
    assert (sent["temperature"], sent["top_p"], sent["return_token_ids"]) == (1.0, 0.9, True)
    assert len(proxy.take()) == 1


@pytest.mark.parametrize("text", ["short", LONG, LONGER], ids=len)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda raw: raw[:-1],
        lambda raw: raw + b"}",
        lambda raw: b"[" + raw + b"]",
        lambda raw: raw.replace(b'"n": 1', b'"n": 01'),
        lambda raw: raw.replace(b'"n": 1', b'"n": "\n"'),
        lambda raw: raw.replace(b'"n": 1', b'"n": "\xff"'),
        lambda raw: raw.replace(b'"n": 1', b'"n": ' + b"9" * 5000),
        lambda raw: raw.replace(b'"n": 1', b'"n": ' + b"[" * 5000 + b"]" * 5000),
        lambda raw: raw.replace(b'"n": 1', b'"n": 1,'),
    ],
)
def test_what_is_no_request_is_refused(fake, proxy, text, spoil) -> None:
    answer = post_raw(proxy, spoil(request_with('"n": 1', text).encode()))
    assert answer.status_code == 400
    assert "the body is not a JSON object: " in answer.json()["error"]["message"]
    assert fake.requests == []
    assert proxy.counts == {"bad_requests": 1}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32-be"])
def test_other_encodings(fake, proxy, encoding) -> None:
    assert (
        post_raw(proxy, request_with('"user": "é😀"', LONGER).encode(encoding)).status_code == 200
    )
    assert fake.bodies()[0]["user"] == "é😀"


def test_compressed_bodies_that_do_not_compress(fake, proxy) -> None:
    text = os.urandom(1 << 20).hex()
    packed = gzip.compress(request_with('"n": 1', text).encode())
    assert post_raw(proxy, packed, **{"Content-Encoding": "gzip"}).status_code == 200
    assert fake.bodies()[0]["messages"][0]["content"] == text


def test_a_large_image_is_refused_in_training_alone(fake, proxy) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + LONGER}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, image]}]
    refused = proxy.post(messages=messages)
    assert refused.status_code == 400
    assert "a part of type 'image_url'" in refused.json()["error"]["message"]
    assert proxy.post(messages=messages, headers={"X-AGL-Train": "0"}).status_code == 200
    assert fake.bodies()[0]["messages"] == messages


def test_every_prompt_of_a_large_list_has_its_choice(fake, proxy) -> None:
    fake.respond = lambda request: Answer()
    prompts = [[5] * 40_000, [6] * 3]
    assert proxy.post("/completions", prompt=prompts, stream=True).status_code == 200
    assert [len(each.call.prompt_ids) for each in proxy.take()] == [40_000, 3]


def test_a_large_field_that_a_call_keeps(fake, proxy) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"a": [LONG, 1]}}}
    proxy.post(response_format=schema)
    assert proxy.take()[0].call.sampling["response_format"] == schema
    assert fake.bodies()[0]["response_format"] == schema


def test_a_large_value_of_a_parameter_is_not_printed(fake, proxy, caplog) -> None:
    proxy.post(temperature=LONG, min_p="1\n2020-01-01 ERROR: forged", **{"field\n" + LONG: 1})
    assert fake.bodies()[0]["temperature"] == 1.0
    assert f"temperature=<{len(LONG) + 2} bytes of JSON>" in caplog.text
    assert "min_p='1\\n2020-01-01 ERROR: forged'" in caplog.text
    assert max(map(len, caplog.text.splitlines())) < 500


@contextmanager
def held(patch: Any, owner: Any, name: str) -> Iterator[tuple[threading.Event, threading.Event]]:
    """A function that waits where it has more than 1 MiB to read: (entered, leave)."""
    entered, leave = threading.Event(), threading.Event()
    original = getattr(owner, name)

    def waits(*arguments: Any) -> Any:
        if any(isinstance(each, bytes) and len(each) > 1 << 20 for each in arguments):
            entered.set()
            assert leave.wait(10)
        return original(*arguments)

    patch.setattr(owner, name, waits)
    try:
        yield entered, leave
    finally:
        leave.set()


@pytest.mark.parametrize("is_answer", [False, True])
def test_others_are_answered_while_a_large_one_is_read(fake, proxy, monkeypatch, is_answer) -> None:
    if is_answer:
        fake.answer_next(Answer(text=LONGER, prompt_token_ids=[1]))
    owner, name = (AnswerCollector, "read_whole") if is_answer else (server_module, "_read_request")
    statuses: list[int] = []

    def ask() -> None:
        text = "short" if is_answer else LONGER
        body = {"model": "policy", "messages": say(text)}
        statuses.append(httpx.post(proxy.base_url() + CHAT, json=body, timeout=20).status_code)

    with held(monkeypatch, owner, name) as (entered, leave):
        thread = threading.Thread(target=ask)
        thread.start()
        assert entered.wait(10)
        assert proxy.post(rollout="ro-2").status_code == 200
        assert statuses == []
        leave.set()
        thread.join(20)
    assert statuses == [200]
    assert len(proxy.take()) == len(proxy.take("ro-2")) == 1


def test_tokens_of_an_answer_whose_agent_leaves_while_it_is_read(fake, proxy, monkeypatch) -> None:
    fake.answer_next(Answer(text=LONGER, prompt_token_ids=[1]))
    body = json.dumps({"model": "policy", "messages": say("hi")}).encode()
    url = httpx.URL(proxy.url)
    with held(monkeypatch, AnswerCollector, "read_whole") as (entered, leave):
        with socket.create_connection((url.host, url.port), timeout=10) as connection:
            connection.sendall(chat_head(length(body)) + body)
            assert entered.wait(10)
        assert proxy.post(rollout="ro-2").status_code == 200
        leave.set()
        wait_until(lambda: "client_gone_tokens" in proxy.counts)
    assert proxy.counts == {"recorded": 1, "client_gone": 1, "client_gone_tokens": 3}


def test_a_large_answer_arrives_as_it_came(fake, proxy) -> None:
    content = [{"token": "é", "logprob": -0.5, "top_logprobs": [{"logprob": -1.0}] * 80}] * 900
    choice = {"index": 0, "finish_reason": "length", "message": {"content": LONG}}
    answer = json.dumps(
        {
            "id": "x",
            "prompt_token_ids": [1, 2],
            "choices": [{**choice, "token_ids": [7] * 900, "logprobs": {"content": content}}],
            "usage": {"completion_tokens": 900},
        }
    ).encode()
    assert len(answer) > 1 << 20
    with serving(answer) as address:
        proxy.server.fleet = fleet_of(address)
        reply = proxy.post()
    assert (reply.status_code, reply.content) == (200, answer)
    (recorded,) = proxy.take()
    assert recorded.call.response_ids.tolist() == [7] * 900
    assert recorded.call.log_probs.tolist() == [-0.5] * 900


@pytest.mark.parametrize(
    ("old", "new", "said", "n_tokens"),
    [
        (b'"logprob": -0.5}]', b'"logprob": NaN}]', "the log-prob of token 29999 is nan", 30_000),
        (b'"completion_tokens": 30000', b'"completion_tokens": 5', "is 5, but 30000", 30_000),
        (b"[7, 7", b"[7", "30000 log-probs came with 29999 token ids", 30_000),
        (b'"token_ids"', b'"other"', "choice 0 has text without token_ids", 30_000),
        (b'"id"', b'"id": 5, "other"', "it cannot be read", 30_000),
        (b"}}", b"}", "it is not JSON", 0),
    ],
)
def test_a_large_answer_that_is_refused(fake, proxy, old, new, said, n_tokens) -> None:
    content = [{"logprob": -0.5}] * 30_000
    choice = {"index": 0, "finish_reason": "stop", "message": {"content": LONGER}}
    choice |= {"token_ids": [7] * 30_000, "logprobs": {"content": content}}
    usage = {"completion_tokens": 30_000}
    answer = {"id": "x", "prompt_token_ids": [1], "choices": [choice], "usage": usage}
    body = json.dumps(answer).encode()
    at = body.rindex(old)
    with serving(body[:at] + new + body[at + len(old) :]) as address:
        proxy.server.fleet = fleet_of(address)
        refused = proxy.post()
    assert refused.status_code == 502
    assert said in refused.json()["error"]["message"]
    assert proxy.counts.get("refused_tokens", 0) == n_tokens
    assert proxy.counts.get("unseen_answers", 0) == (n_tokens == 0)
