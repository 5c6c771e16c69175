"""Reading vLLM's answers, and the parts of the proxy that need no connection."""

from __future__ import annotations

import json

import numpy as np
import pytest

from agl_fast.proxy.answer_checks import Asked, BadAnswerError
from agl_fast.proxy.answers import AnswerCollector, read_answer
from agl_fast.proxy.engines import vllm
from agl_fast.proxy.events import EventReader
from agl_fast.proxy.fleet import Fleet
from agl_fast.proxy.recorder import RecordedCall, Recorder
from agl_fast.rows.calls import Call
from agl_fast.verl.addresses import is_loopback, routable_address, url_host

EVENTS = [
    b"data: one\n\n",
    b": comment\n\n",
    b"event: x\r\ndata:two\r\n\r\n",
    b"data: a\ndata: b\n\n",
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_events_whatever_the_chunks(size):
    stream, reader = b"".join(EVENTS), EventReader()
    chunks = [stream[start : start + size] for start in range(0, len(stream), size)]
    found = [event for chunk in chunks for event in reader.feed(chunk)]
    assert [event.data for event in found] == [b"one", None, b"two", b"a\nb"]
    assert b"".join(event.raw for event in found) + reader.rest == stream


def answer_of(**choice):
    return json.dumps({"id": "x", "prompt_token_ids": [1, 2], "choices": [choice]}).encode()


def test_echoed_prompt_s_log_probs_are_cut_off():
    log_probs = {"token_logprobs": [None, -1.0, -0.25]}
    answer = answer_of(index=0, token_ids=[7], logprobs=log_probs)
    _, (choice,) = read_answer(answer, vllm, Asked(echo=True))
    assert choice.log_probs.tolist() == [-0.25]


def test_empty_response_is_an_answer():
    _, (choice,) = read_answer(answer_of(index=0, token_ids=[], logprobs={"content": []}), vllm)
    assert choice.response_ids.shape == choice.log_probs.shape == (0,)


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b"[]",
        b'{"choices": []}',
        b'{"choices": [{"token_ids": "1, 2"}], "prompt_token_ids": [1]}',
        b'{"choices": [{"token_ids": null}], "prompt_token_ids": [1]}',
        b'{"choices": [{"token_ids": [1]}], "prompt_token_ids": null}',
        b'{"choices": [{"token_ids": [1.5]}], "prompt_token_ids": [1]}',
        b'{"choices": [{"token_ids": [4294967296]}], "prompt_token_ids": [1]}',
    ],
)
def test_anything_else_is_an_error(body):
    with pytest.raises(BadAnswerError):
        read_answer(body, vllm)


def test_parts_of_a_stream_make_the_whole():
    collector = AnswerCollector(vllm, Asked(choices=2))
    collector.add(b'{"id": "x", "prompt_token_ids": [1], "choices": [{"index": 0}, {"index": 1}]}')
    for position in range(3):
        for index in (1, 0):
            piece = {"index": index, "token_ids": [10 * index + position]}
            piece["logprobs"] = {"content": [{"logprob": -float(position)}]}
            piece["finish_reason"] = "stop" if position == 2 else None
            collector.add(json.dumps({"id": "x", "choices": [piece]}).encode())
    collector.add(b'{"id": "x", "choices": [], "usage": {"completion_tokens": 6}}')
    assert collector.complete
    first, second = collector.choices()
    assert (first.response_ids.tolist(), second.response_ids.tolist()) == ([0, 1, 2], [10, 11, 12])
    assert first.log_probs.dtype == np.float32
    assert first.log_probs.tolist() == [0.0, -1.0, -2.0]


def recorded(response_id, sequence=0):
    return RecordedCall(Call([1], [2], [0.0], response_id=response_id), sequence, 0.0, 0.0, "x")


def test_recorder_forgets():
    recorder = Recorder()
    recorder.add("ro", "at", [recorded("a"), recorded("b")])
    recorder.withdraw("ro", "at", ["a", "never"])
    assert recorder.counts == {"recorded": 1, "client_gone_tokens": 1}
    recorder.forget_all_but()
    assert recorder.take("ro", "at") == []
    counts = {"recorded": 1, "client_gone_tokens": 1, "forgotten": 1, "forgotten_tokens": 1}
    assert recorder.reset_counts() == counts
    assert recorder.counts == {}


def test_calls_without_response_id_are_all_kept():
    recorder = Recorder()
    recorder.add("ro", "at", [recorded(None, sequence=1)])
    recorder.add("ro", "at", [recorded(None, sequence=2)])
    assert len(recorder.take("ro", "at")) == 2


def entry(name, **parameters):
    return {"model_name": name, "litellm_params": parameters}


def test_fleet_reads_agent_lightning_s_entries():
    fleet = Fleet(
        [
            entry("m", api_base="http://a:1/v1/", model="hosted_vllm/openai/gpt"),
            entry("m", api_base="http://b:1", api_key="k"),
        ]
    )
    assert [(server.url, server.model, server.api_key) for server in fleet.servers] == [
        ("http://a:1", "openai/gpt", None),
        ("http://b:1", "m", "k"),
    ]


def test_fleet_refuses_what_it_cannot_serve():
    with pytest.raises(ValueError, match=r"\['m', 'other'\]"):
        Fleet([entry("m", api_base="http://a"), entry("other", api_base="http://b")])
    with pytest.raises(ValueError, match=r"'m'.*api_base"):
        Fleet([entry("m")])


def test_addresses():
    assert all(map(is_loopback, ["127.0.0.1", "127.1.2.3", "::1", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "example.org"]))
    assert routable_address("10.0.0.1") == "10.0.0.1"
    assert routable_address("example.org") == "example.org"
    assert routable_address("0.0.0.0") not in ("0.0.0.0", "")
    assert (url_host("::1"), url_host("10.0.0.1")) == ("[::1]", "10.0.0.1")
