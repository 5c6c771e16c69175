"""Answers that cannot be a row are refused, named and counted; nothing that was sampled is lost."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

import agl_fast
from agl_fast.proxy.answer_checks import ModelLimits
from support.answer_events import chat, event, role, text, token, usage
from support.fake_openai_server import Answer, prompt_ids_of
from support.raw_http import fleet_of, serving
from support.running_proxy import CHAT, RunningProxy, say

END = {"finish_reason": "stop"}


def post_to(proxy: RunningProxy, answer: bytes | list[Any], **body: Any) -> httpx.Response:
    """The proxy's answer where a server gives this one, whole or as events."""
    kind = b"application/json"
    if isinstance(answer, list):
        lines = [b"data: " + json.dumps(each).encode() + b"\n\n" for each in answer]
        answer, kind = b"".join(lines) + b"data: [DONE]\n\n", b"text/event-stream"
        body["stream"] = True
    with serving(answer, kind) as address:
        proxy.server.fleet = fleet_of(address)
        return proxy.post(**body)


def whole(**choice: Any) -> bytes:
    usage = choice.pop("usage", None)
    choices = [{"index": 0, "finish_reason": "stop", **choice}]
    answer = {"id": "x", "prompt_token_ids": [1, 2], "choices": choices}
    return json.dumps(answer if usage is None else {**answer, "usage": usage}).encode()


@pytest.mark.parametrize(
    ("answer", "cause", "n_tokens", "words"),
    [
        (whole(token_ids=[11, 12, 13], logprobs=chat(-1, -2, -3, -4, -5)), "log_probs", 3, "5 3"),
        (whole(token_ids=[1], usage={"completion_tokens": 5}), "usage", 5, "5 1"),
        (whole(token_ids=[1, 2], logprobs=chat(-1, 1e300)), "log_probs", 2, "token 1 1e+300"),
        (whole(token_ids=[1, 2], logprobs=chat(float("nan"), -1)), "log_probs", 2, "token 0 nan"),
        (whole(token_ids=[1, 999]), "vocabulary", 2, "token_ids[1] 999"),
        ([role(), token(1), token(3, **END), usage(3)], "usage", 3, "3 2"),
        ([role(), event(token_ids=[13], logprobs=chat(-1, -2), **END)], "log_probs", 1, "2 1"),
        ([role(), token(1, **END), token(2, 3)], "after_finish", 3, "2 token ids"),
    ],
)
def test_refused_and_counted(
    proxy: RunningProxy, caplog: Any, answer: Any, cause: str, n_tokens: int, words: str
) -> None:
    proxy.train()
    proxy.server.limits = ModelLimits(vocabulary_size=100)
    refused = post_to(proxy, answer)
    assert refused.status_code == 502
    message = refused.json()["error"]["message"]
    assert "choice 0" in message
    assert "return_token_ids" not in message
    for word in words.split():
        assert word in message
    assert proxy.take() == []
    assert proxy.counts["refused_answers"] == proxy.counts[f"refused_answers.{cause}"] == 1
    assert proxy.counts["refused_tokens"] == n_tokens
    assert "unseen_answers" not in proxy.counts
    assert "cannot be trained on" in caplog.text


def test_a_stream_that_lost_ids_is_refused(proxy: RunningProxy) -> None:
    refused = post_to(proxy, [role(), text("4"), text("2"), token(13, **END)])
    assert refused.status_code == 502
    assert "choice 0 has text without token_ids" in refused.json()["error"]["message"]
    assert proxy.take() == []


def test_a_refusal_within_a_stream_is_an_error_event(fake: Any, proxy: RunningProxy) -> None:
    """The agent has a part of the answer: it learns why the rest does not come."""
    fake.answer_next(Answer(usage=5, chunk_delay=0.1))
    body = {"model": "policy", "messages": say("hi"), "stream": True}
    with proxy.client.stream("POST", proxy.base_url() + CHAT, json=body) as reply:
        chunks = reply.iter_raw()
        parts = [next(chunks)]
        with pytest.raises(httpx.RemoteProtocolError):
            parts.extend(chunks)
    said = b"".join(parts)
    assert b"usage.completion_tokens is 5, but 3 token ids came" in said
    assert b'"finish_reason": "stop"' not in said
    assert proxy.take() == []
    counts = {"streams": 1, "refused_answers": 1, "refused_answers.usage": 1, "refused_tokens": 5}
    assert proxy.counts == counts


def test_an_agent_that_asks_for_no_usage_gets_none(fake: Any, proxy: RunningProxy) -> None:
    for options in (None, {"include_usage": False}, {"include_usage": True}):
        more = {} if options is None else {"stream_options": options}
        events = [
            json.loads(line.removeprefix("data: "))
            for line in proxy.post(stream=True, **more).text.split("\n\n")
            if line and "[DONE]" not in line
        ]
        usages = [each["usage"] for each in events if each.get("usage")]
        assert len(usages) == (1 if options == {"include_usage": True} else 0)
        assert all(each["choices"] for each in events if not each.get("usage"))
    assert all(body["stream_options"]["include_usage"] for body in fake.bodies())
    assert len(proxy.take()) == 3


def test_requests_that_are_not_recorded_ask_for_no_usage(fake: Any, proxy: RunningProxy) -> None:
    assert "usage" not in proxy.post(rollout=None, stream=True).text
    assert "stream_options" not in fake.bodies()[0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "last", "said", "expected"),
    [
        ({"max_tokens": 40}, 1, "tool_calls", "length"),
        ({"max_completion_tokens": 40, "max_tokens": 80}, 1, "tool_calls", "length"),
        ({"max_tokens": 41}, 9, "tool_calls", "tool_calls"),
        ({"max_tokens": 40}, 9, "tool_calls", "tool_calls"),
        ({"max_tokens": 41}, 1, "tool_calls", "abort"),
        ({}, 1, "tool_calls", "tool_calls"),
        ({"max_tokens": 40}, 9, "stop", "stop"),
    ],
)
def test_finish_reason_of_a_tool_call(
    fake: Any, proxy: RunningProxy, stream: bool, asked: Any, last: int, said: str, expected: str
) -> None:
    """The recorded call says what ended the sampling; the agent has the server's word."""
    proxy.server.limits = ModelLimits(context_length=1000, end_ids=frozenset({9}))
    fake.answer_next(Answer(token_ids=[5] * 39 + [last], finish_reason=said))
    answer = proxy.post(stream=stream, **asked)
    assert f'"finish_reason": "{said}"' in answer.text
    assert proxy.take()[0].call.finish_reason == expected


def test_an_answer_that_fills_the_context_has_finish_reason_length(
    fake: Any, proxy: RunningProxy
) -> None:
    prompt = len(prompt_ids_of(say("hi")))
    for longer, expected in ((0, "length"), (1, "tool_calls")):
        proxy.server.limits = ModelLimits(context_length=prompt + 3 + longer)
        fake.answer_next(Answer(finish_reason="tool_calls"))
        proxy.post()
        assert proxy.take()[0].call.finish_reason == expected


def test_the_limit_of_the_run_counts_unless_it_was_lifted(fake: Any, proxy: RunningProxy) -> None:
    proxy.train(max_tokens=3)
    fake.respond = lambda request: Answer(finish_reason="tool_calls")
    proxy.post()
    too_long = {"error": {"message": "This model's maximum context length is 4 tokens."}}
    fake.answer_next(Answer(status=400, error_body=too_long))
    proxy.post()
    assert [each.call.finish_reason for each in proxy.take()] == ["length", "tool_calls"]


@pytest.mark.parametrize(("value", "why"), [(-9999.0, "none"), (0.25, "positive")])
def test_log_probs_that_are_missing(fake: Any, proxy: RunningProxy, value: float, why: str) -> None:
    fake.answer_next(Answer(log_probs=[-0.5, value, -0.5]))
    proxy.post()
    (recorded,) = proxy.take()
    assert recorded.call.log_probs is None
    assert proxy.counts == {"recorded": 1, "without_log_probs": 1, f"without_log_probs.{why}": 1}


def test_one_response_id_for_other_answers(fake: Any, proxy: RunningProxy) -> None:
    """A server or an agent that names every response alike loses no answer."""
    for first in (20, 30, 20, 40):
        ids = range(first, first + 7)
        fake.answer_next(Answer(response_id="conv-7", token_ids=ids))
        proxy.post()
    calls = [each.call for each in proxy.take()]
    assert [call.response_ids[0] for call in calls] == [20, 30, 40]
    counts = {"recorded": 3, "response_id_clashes": 2, "duplicates": 1, "duplicate_tokens": 7}
    assert proxy.counts == counts
    batch = agl_fast.build_batch(
        [agl_fast.Rollout("r", "d", calls)],
        max_prompt_length=64,
        max_response_length=64,
        pad_token_id=0,
    )
    assert (batch.accounting.sampled, batch.accounting.trained) == (21, 21)


def test_choices_of_an_answer_without_an_id_are_all_kept(proxy: RunningProxy) -> None:
    choices = [{"index": n, "token_ids": [5], "finish_reason": "stop"} for n in range(3)]
    answer = json.dumps({"prompt_token_ids": [1], "choices": choices}).encode()
    assert post_to(proxy, answer, n=3).status_code == 200
    assert len(proxy.take()) == 3
    assert proxy.counts == {"recorded": 3, "without_log_probs": 3}


def test_a_late_answer_is_counted(fake: Any, proxy: RunningProxy) -> None:
    proxy.post()
    proxy.take()
    proxy.server.recorder.discard("ro-1")
    proxy.post()
    assert proxy.take() == []
    assert proxy.counts == {"recorded": 1, "late": 1, "late_tokens": 3}
    proxy.server.recorder.forget_all_but()
    proxy.post()
    assert len(proxy.take()) == 1


def test_what_a_broken_stream_had_sampled_is_counted(fake: Any, proxy: RunningProxy) -> None:
    fake.answer_next(Answer(token_ids=range(10), hang_up="midway"))
    with pytest.raises(httpx.RemoteProtocolError):
        proxy.post(stream=True)
    fake.answer_next(Answer(token_ids=range(10), error_event=True))
    proxy.post(stream=True)
    assert proxy.counts["incomplete_tokens"] == fake.sampled
    assert proxy.counts["server_errors"] == 2


def data(event: Any) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


WHOLE_STREAM = [data(role()), data(token(11)), data(token(13, **END)), data(usage(2))]


@pytest.mark.parametrize(
    "lines",
    [
        [*WHOLE_STREAM],  # no [DONE]
        [*WHOLE_STREAM, b"data: [DONE]"],  # without its empty line
        [*WHOLE_STREAM, b"data: [DONE]\n\n", b"data: [DONE]\n\n"],
        [*WHOLE_STREAM, b"data:[DONE]  \r\n\r\n"],
        [b"data:\n\n", *WHOLE_STREAM, b"data: \n\ndata\n\n", b"data: [DONE]\n\n"],
        [b": ping\n\n", b"event: message\nid: 7\nretry: 10\n", *WHOLE_STREAM, b"data: [DONE]\n\n"],
        [*WHOLE_STREAM[:3], data({"id": "x", "choices": []}), b"data: [DONE]\n\n"],
    ],
)
def test_a_stream_may_end_as_it_likes(proxy: RunningProxy, lines: list[bytes]) -> None:
    raw = b"".join(lines)
    with serving(raw, b"text/event-stream; charset=utf-8") as address:
        proxy.server.fleet = fleet_of(address)
        reply = proxy.post(stream=True, stream_options={"include_usage": True})
    assert (reply.status_code, reply.content) == (200, raw)
    (recorded,) = proxy.take()
    assert recorded.call.response_ids.tolist() == [11, 13]
    assert proxy.counts == {"streams": 1, "recorded": 1}


@pytest.mark.parametrize("lines", [WHOLE_STREAM[:2], [*WHOLE_STREAM[:2], b"data: [DONE]\n\n"]])
def test_a_stream_that_ends_before_its_answer(proxy: RunningProxy, lines: list[bytes]) -> None:
    proxy.train()
    with serving(b"".join(lines), b"text/event-stream") as address:
        proxy.server.fleet = fleet_of(address)
        with pytest.raises(httpx.RemoteProtocolError):
            proxy.post(stream=True)
    assert proxy.take() == []
    assert proxy.counts["incomplete_tokens"] == 1
    assert "unseen_answers" not in proxy.counts


def test_an_event_may_be_very_long(proxy: RunningProxy) -> None:
    """It arrives in many pieces: a prompt's text and log-probs stand in the first one."""
    first = {**role(), "prompt_text": "é" * 300_000}
    raw = b"".join([data(first), *WHOLE_STREAM[1:], b"data: [DONE]\n\n"])
    with serving(raw, b"text/event-stream") as address:
        proxy.server.fleet = fleet_of(address)
        reply = proxy.post(stream=True, stream_options={"include_usage": True})
    assert reply.content == raw
    assert len(proxy.take()) == 1


@pytest.mark.parametrize("status", [200, 201, 206, 226])
def test_every_success_is_recorded(proxy: RunningProxy, status: int) -> None:
    with serving(whole(token_ids=[1, 2]), status=b"%d Fine" % status) as address:
        proxy.server.fleet = fleet_of(address)
        assert proxy.post().status_code == status
    assert len(proxy.take()) == 1


def test_a_redirect_is_no_answer(proxy: RunningProxy) -> None:
    """The agent would follow it past the proxy."""
    with serving(b"", status=b"307 Elsewhere") as address:
        proxy.server.fleet = fleet_of(address)
        reply = proxy.post()
    assert reply.status_code == 502
    assert "redirects" in reply.json()["error"]["message"]
    assert proxy.counts["server_errors"] == 1
