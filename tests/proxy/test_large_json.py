"""What is read and written piece by piece is what json would have read and written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agl_fast.proxy import large_json
from agl_fast.proxy.answer_checks import BadAnswerError
from agl_fast.proxy.answers import read_answer
from agl_fast.proxy.engines import vllm
from agl_fast.proxy.engines.base import CHAT, COMPLETIONS
from agl_fast.proxy.large_json import LargeValue, decoded, encoded, read_object
from agl_fast.proxy.media import media_of
from agl_fast.proxy.outgoing import read_body, recordable
from agl_fast.proxy.sampling import Phase, SamplingPolicy
from support.json_values import TEXT, VALUES

TRAIN = Phase("train", SamplingPolicy(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=9))


@contextmanager
def everything_is_large(n_bytes: int = 6) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_json, "LARGE_BYTES", n_bytes)
        yield


def rewritten(body: dict[str, Any]) -> Any:
    return json.loads(b"".join(encoded(body)))


@given(st.dictionaries(TEXT, VALUES, max_size=4), st.integers(2, 30))
def test_read_and_written_in_pieces(value: dict[str, Any], n_bytes: int) -> None:
    text = json.dumps(value).encode()
    with everything_is_large(n_bytes):
        body = read_object(text)
        assert repr(decoded(body)) == repr(body)
        assert repr({name: decoded(each) for name, each in body.items()}) == repr(value)
        assert repr(rewritten({"more": [1, body], "a": None, **body})) == repr(
            {"more": [1, value], "a": None, **value}
        )


def test_a_value_stays_the_text_that_it_came_as() -> None:
    text = b'{"messages":[1, 2.50,1e400,"\\ud800\\u0041"],"temperature":1}'
    with everything_is_large():
        body = read_object(text)
        assert isinstance(body["messages"], LargeValue)
        pieces = encoded({**body, "temperature": 0.5})
    assert b"".join(pieces) == text.replace(b'"temperature":1', b'"temperature":0.5')


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32-le"])
def test_every_encoding_of_json(encoding: str) -> None:
    value = {"messages": "é€😀" * 20_000, "model": "policy"}
    for text in (json.dumps(value, ensure_ascii=False), json.dumps(value)):
        body = read_body(text.encode(encoding))
        assert {name: decoded(each) for name, each in body.items()} == value


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": "%b"' % (b"x" * 70_000),
        b'["%b"]' % (b"x" * 70_000),
        b'{"a": "%b\xff"}' % (b"x" * 70_000),
        b'{"a": "%b", "b": nonsense}' % (b"x" * 70_000),
        b'{"a":' + b"[" * 40_000 + b"]" * 40_000 + b"}",
        '{"a": "é"'.encode("utf-16") + b"x" * 70_000,
        b"\x00" * 70_000,
    ],
)
def test_large_bodies_that_are_no_object(text: bytes) -> None:
    with pytest.raises(ValueError, match="the body is not a JSON object: "):
        read_body(text)


def part(draw: Any, depth: int = 0) -> Any:
    kind = draw(st.sampled_from(["text", "image_url", "input_audio", "tool", None, 5, "refusal"]))
    held = draw(st.sampled_from(["text", "image_url", "video", "prompt_embeds", "other"]))
    value = draw(st.sampled_from([None, "a long text of the agent's", {"url": "data:," + "x" * 9}]))
    found: dict[str, Any] = {held: value}
    if kind is not None:
        found["type"] = kind
    if draw(st.booleans()):
        found["uuid"] = draw(st.sampled_from([None, "the-id-of-it"]))
    if depth < 2 and draw(st.booleans()):
        found["content"] = [part(draw, depth + 1) for _ in range(draw(st.integers(0, 2)))]
    return draw(st.sampled_from([found, found, found, "a text alone", None, 5, [found]]))


@st.composite
def conversations(draw: Any) -> Any:
    messages = []
    for _ in range(draw(st.integers(0, 3))):
        content = [part(draw) for _ in range(draw(st.integers(0, 3)))]
        content = draw(st.sampled_from([content, "only a text", None]))
        messages.append(draw(st.sampled_from([{"role": "user", "content": content}, 1, "text"])))
    return draw(st.sampled_from([messages, messages, messages, "no list", {"content": messages}]))


@given(conversations())
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_media_are_found_in_large_messages(messages: Any) -> None:
    expected = media_of(messages, vllm.MEDIA_REFERENCE)
    with everything_is_large(20):
        body = read_object(json.dumps({"messages": messages, "a": 1}).encode())
        found = media_of(body["messages"], vllm.MEDIA_REFERENCE)
    # A part may hold several: which one is named is not said.
    assert (found is None) == (expected is None)


FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOLS = st.lists(
    st.sampled_from(
        [
            {"type": "function", "function": FUNCTION},
            {"type": "function", "function": {**FUNCTION, "strict": True}},
            {"type": "function", "function": {**FUNCTION, "strict": "false"}},
            {"type": "function", "function": {"strict": 1, **FUNCTION}, "strict": True},
            {"type": "function"},
            "no tool",
        ]
    ),
    max_size=3,
)
SENT = st.fixed_dictionaries(
    {"messages": st.lists(st.just({"role": "user", "content": "hello there"}), max_size=3)},
    optional={
        "tools": TOOLS,
        "n": st.sampled_from([2, "2", 2.0, True, None, "many"]),
        "response_format": st.just({"type": "json_object", "more": ["a text"]}),
        "logit_bias": st.dictionaries(st.sampled_from(["123456", "7"]), st.just(-100.0)),
        "stop": st.just(["one stop string", "another"]),
        "stream_options": st.just({"include_usage": True, "other": "something"}),
        "temperature": st.sampled_from([0.5, "a string that is no number"]),
        "a field of no version of vLLM": st.just({"deep": [1, 2, 3]}),
        "request_id": st.just("conversation-7"),
    },
)


@given(SENT, st.sampled_from(["train", "val"]), st.booleans())
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_a_large_request_goes_out_as_a_small_one(
    sent: dict[str, Any], phase: Any, enforce: bool
) -> None:
    from dataclasses import replace

    assert TRAIN.sampling is not None
    at_hand = Phase(phase, replace(TRAIN.sampling, enforce=enforce))
    expected = recordable(sent, CHAT, at_hand, vllm, trainable=True)
    with everything_is_large():
        body = read_body(json.dumps(sent).encode())
        found = recordable(body, CHAT, at_hand, vllm, trainable=True)
        assert rewritten(dict(found.body)) == expected.body
        assert found.sampling == expected.sampling
        assert vllm.has_strict_tools(body) == vllm.has_strict_tools(sent)
    for name in ("recorded", "capped", "choices", "unenforced", "replaced", "unknown", "seeded"):
        assert getattr(found, name) == getattr(expected, name), name
    assert found.overridden.keys() == expected.overridden.keys()
    assert found.deviating.keys() == expected.deviating.keys()


@pytest.mark.parametrize(
    ("prompt", "choices"),
    [
        ("a prompt of one text", 2),
        (["one prompt", "another", "a third"], 6),
        ([15496, 11, 995], 2),
        ([[15496, 11, 995], [15496, 11]], 4),
        ([], 2),
    ],
)
def test_prompts_are_counted(prompt: Any, choices: int) -> None:
    sent = {"prompt": prompt, "n": 2}
    assert recordable(sent, COMPLETIONS, TRAIN, vllm, trainable=True).choices == choices
    with everything_is_large():
        body = read_body(json.dumps(sent).encode())
        assert recordable(body, COMPLETIONS, TRAIN, vllm, trainable=True).choices == choices


LOG_PROB = st.sampled_from([-0.5, -1, 0, None, -9999.0, "x", True, 1e300])
LOG_PROBS = st.lists(LOG_PROB, max_size=4)
CONTENT = LOG_PROBS.map(
    lambda values: [{"token": "a", "logprob": each, "top_logprobs": [{}]} for each in values]
)
CHOICE = st.fixed_dictionaries(
    {"token_ids": st.sampled_from([[1, 2, 3], [1], [], None, "ids", [1.5]])},
    optional={
        "index": st.sampled_from([0, 1, 2, -1, "0", None]),
        "finish_reason": st.sampled_from(["stop", "length", None, 5]),
        "stop_reason": st.sampled_from([5, "stop", None, [1]]),
        "message": st.sampled_from([{"role": "assistant", "content": "hi"}, "text", None, {}]),
        "text": st.sampled_from(["a text", "", None]),
        "logprobs": st.sampled_from([None, 5, [], {}, {"content": None}, {"content": {}}])
        | CONTENT.map(lambda content: {"content": content})
        | LOG_PROBS.map(lambda values: {"token_logprobs": values, "tokens": ["a"]})
        | st.tuples(CONTENT, LOG_PROBS).map(
            lambda both: {"token_logprobs": both[1], "content": both[0]}
        ),
    },
)
ANSWERS = st.fixed_dictionaries(
    {
        "id": st.sampled_from(["x", "chatcmpl-123"]),
        "prompt_token_ids": st.sampled_from([[1, 2], None]),
        "choices": st.lists(CHOICE | st.sampled_from([None, 5, []]), max_size=3)
        | st.sampled_from([None, {}, "no choices"]),
    },
    optional={
        "usage": st.sampled_from(
            [None, {"completion_tokens": 3}, {"completion_tokens": -1}, {"completion_tokens": "3"}]
        ),
        "error": st.sampled_from([None, {"message": "failed"}]),
        "prompt_logprobs": st.just([None, {"5": {"logprob": -1}}]),
    },
)


def outcome(text: bytes) -> Any:
    """What is read, or why it is refused."""
    try:
        response_id, choices = read_answer(text, vllm)
    except BadAnswerError as error:
        return error.cause, None if error.cause == "unreadable" else str(error)
    return response_id, repr(choices)


@given(ANSWERS)
@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
def test_a_large_answer_is_read_as_a_small_one(answer: dict[str, Any]) -> None:
    text = json.dumps(answer).encode()
    expected, tokens = outcome(text), (vllm.ids_in(text), vllm.claimed_tokens(text, 100))
    with everything_is_large(16):
        assert outcome(text) == expected
        assert (vllm.ids_in(text), vllm.claimed_tokens(text, 100)) == tokens
