"""What the proxy asks of a server, what it records, and what it leaves as it is."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import openai
import pytest

import agl_fast
from support.fake_openai_server import Answer, FakeOpenAIServer, prompt_ids_of
from support.running_proxy import CHAT, POLICY, RunningProxy, running_proxy, say


def openai_client(proxy: RunningProxy) -> openai.OpenAI:
    return openai.OpenAI(base_url=proxy.base_url(), api_key="any", max_retries=0)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TOOL_CALL = {
    "id": "call-1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"prompt_token_ids": [1]}'},
}


def test_call_is_recorded_packed(fake, proxy):
    fake.answer_next(Answer(token_ids=[5, 6], log_probs=[-0.25, -1.5], finish_reason="length"))
    proxy.train()
    proxy.post(headers={"X-AGL-Agent": "solver"})
    (recorded,) = proxy.take()
    call = recorded.call
    assert call.prompt_ids.dtype == call.response_ids.dtype == np.int32
    assert call.prompt_ids.tolist() == prompt_ids_of(say("hi"))
    assert call.response_ids.tolist() == [5, 6]
    assert call.log_probs.tolist() == [-0.25, -1.5]
    assert call.response_id == recorded.response_id == f"chatcmpl-{fake.port}-0"
    assert (call.finish_reason, call.policy_version, call.agent) == ("length", 3, "solver")
    assert call.trainable
    assert dict(call.sampling) == {"temperature": 1.0, "top_p": 0.9, "top_k": -1}
    assert recorded.started_at <= recorded.finished_at
    assert proxy.counts == {"recorded": 1}


def test_calls_of_a_conversation_make_one_row(fake, proxy):
    fake.respond = lambda request: Answer(token_ids=[ord(c) for c in "ahello\n"])
    proxy.post(messages=say("hi"))
    proxy.post(messages=say("hi", "hello", "and?"))
    calls = [recorded.call for recorded in proxy.take()]
    batch = agl_fast.build_batch(
        [agl_fast.Rollout("ro-1", "data", calls, 1.0)],
        level="trajectory",
        max_prompt_length=16,
        max_response_length=64,
        pad_token_id=0,
    )
    assert batch.columns["rollout_id_list"] == ["ro-1"]
    assert batch.accounting.trained == 14


def test_everything_else_is_forwarded_untouched(fake, proxy):
    body = {
        "messages": [{"role": "user", "content": "ü \ud83d \u2028"}],
        "tools": TOOLS,
        "tool_choice": "auto",
        "temperature": 0.30000000000000004,
        "extra": {"nested": [1, 2.50, None, True]},
        "seed": 12345678901234567890,
        "max_tokens": 7,
    }
    proxy.client.post(
        proxy.base_url() + CHAT,
        content=json.dumps({"model": "policy", **body}),
        headers={"X-Mine": "yes", "X-Request-Id": "same", "Authorization": "Bearer secret"},
    )
    asked = {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
    assert fake.requests[0].body == {"model": "policy", **body, **asked}
    assert fake.requests[0].headers["X-Mine"] == "yes"
    # One id for several answers would make them one call.
    assert not {"X-Request-Id", "Authorization"} & set(fake.requests[0].headers)
    # Ids are read out of the answer, so nobody may compress it.
    assert "Accept-Encoding" not in fake.requests[0].headers


def test_client_s_own_logprobs_stay(fake, proxy):
    proxy.post(logprobs=True, top_logprobs=4)
    proxy.post("/completions", logprobs=2)
    assert fake.bodies()[0]["top_logprobs"] == 4
    assert fake.bodies("/v1/completions")[0]["logprobs"] == 2


def test_answer_passes_byte_for_byte(fake, proxy):
    fake.answer_next(Answer(response_id="x", headers={"X-Theirs": "1"}))
    through = proxy.post()
    asked = {"return_token_ids": True, "logprobs": True}
    fake.answer_next(Answer(response_id="x"))
    direct = proxy.client.post(
        fake.url + "/v1/chat/completions", json={"model": "policy", "messages": say("hi"), **asked}
    )
    assert through.content == direct.content
    assert through.headers["X-Theirs"] == "1"


def test_tool_calls_whole_and_streamed(fake, proxy):
    fake.respond = lambda request: Answer(tool_calls=[TOOL_CALL], finish_reason="tool_calls")
    client = openai_client(proxy)
    request = {"model": "policy", "messages": say("1 + 1?"), "tools": TOOLS}
    whole = client.chat.completions.create(**request)
    assert whole.choices[0].message.tool_calls[0].function.name == "add"
    streamed = list(client.chat.completions.create(**request, stream=True))
    arguments = streamed[-1].choices[0].delta.tool_calls[0].function.arguments
    assert json.loads(arguments) == {"prompt_token_ids": [1]}
    first, second = (recorded.call for recorded in proxy.take())
    assert first.response_ids.tolist() == second.response_ids.tolist() == [11, 12, 13]
    assert first.prompt_ids.tolist() == second.prompt_ids.tolist() == prompt_ids_of(say("1 + 1?"))
    assert first.finish_reason == second.finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_is_a_call(fake, proxy, stream):
    proxy.post(n=2, stream=stream)
    first, second = proxy.take()
    assert (first.call.response_ids.tolist(), second.call.response_ids.tolist()) == (
        [11, 12, 13],
        [12, 13, 14],
    )
    assert first.response_id == second.response_id == f"chatcmpl-{fake.port}-0"
    assert first.call.response_id != second.call.response_id
    assert first.sequence == second.sequence
    assert first.call.prompt_ids.tolist() == second.call.prompt_ids.tolist()


@pytest.mark.parametrize("stream", [False, True])
def test_completions(fake, proxy, stream):
    proxy.post("/completions", prompt=["ab", "c"], stream=stream)
    first, second = (recorded.call for recorded in proxy.take())
    assert (first.prompt_ids.tolist(), second.prompt_ids.tolist()) == ([97, 98], [99])
    assert first.log_probs.tolist() == [-0.5, -0.5, -0.5]
    proxy.post("/completions", prompt=[5, 6], stream=stream)
    assert proxy.take()[0].call.prompt_ids.tolist() == [5, 6]


def test_path_without_v1(fake, proxy):
    url = proxy.base_url().removesuffix("/v1") + CHAT
    proxy.client.post(url, json={"model": "policy", "messages": say("hi")})
    assert len(proxy.take()) == 1


def test_rollout_ids_are_unquoted(fake, proxy):
    proxy.post(rollout="a%2Fb")
    assert len(proxy.take("a/b")) == 1


def test_path_without_rollout_is_forwarded_and_counted(fake, proxy):
    proxy.train()
    assert proxy.post(rollout=None, temperature=0.1).status_code == 200
    assert fake.bodies()[0] == {"model": "policy", "messages": say("hi"), "temperature": 0.1}
    assert proxy.counts == {"unrecorded": 1}


def test_models(fake, proxy):
    for rollout in ("ro-1", None):
        answer = proxy.client.get(proxy.base_url(rollout) + "/models")
        assert answer.json()["data"][0]["id"] == "policy"
    assert proxy.client.get(proxy.url + "/health").status_code == 200


def test_model_goes_by_the_server_s_name():
    with FakeOpenAIServer(model="openai/its-own-name") as fake, running_proxy(fake) as proxy:
        proxy.post()
        proxy.post(model="another")
        assert [body["model"] for body in fake.bodies()] == ["openai/its-own-name", "another"]


def test_streams_as_it_arrives(fake, proxy):
    fake.answer_next(Answer(token_ids=range(50, 60), chunk_delay=0.1))
    client = openai_client(proxy)
    request = {"model": "policy", "messages": say("hi"), "stream": True}
    events = iter(client.chat.completions.create(**request))
    next(events)
    assert proxy.counts == {"streams": 1}
    for event in events:
        if event.choices[0].finish_reason is not None:
            # Recorded before the agent can act on the answer.
            assert proxy.counts == {"streams": 1, "recorded": 1}
    (recorded,) = proxy.take()
    assert recorded.call.response_ids.tolist() == list(range(50, 60))
    assert len(recorded.call.log_probs) == 10


def test_training_s_sampling_overrides(fake, proxy, caplog):
    proxy.train()
    proxy.post(temperature=0.2, top_k=0, min_p=0.1, presence_penalty=0, tool_choice="required")
    proxy.post(temperature=0.3, top_p=0.5)
    proxy.post()
    for body in fake.bodies():
        assert (body["temperature"], body["top_p"], body["top_k"]) == (1.0, 0.9, -1)
        assert body["min_p"] == 0.0
    assert fake.bodies()[0]["tool_choice"] == "required"
    assert proxy.counts == {
        "recorded": 3,
        "sampling_overridden": 2,
        "sampling_overridden.temperature": 2,
        "sampling_overridden.top_p": 1,
        "sampling_overridden.min_p": 1,
        "sampling_unenforced": 1,
        "sampling_unenforced.tool_choice": 1,
    }
    assert [record.message for record in caplog.records if "temperature" in record.message] == [
        "Agents ask for temperature=0.2; training samples with temperature=1.0 (sampling: enforce)."
    ]


def test_strict_tools_do_not_bend_what_training_samples(fake, proxy):
    """vLLM constrains an answer to them, and the actor knows nothing of that."""
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {}, **more}}
        for name, more in (("a", {"strict": True}), ("b", {"strict": False}), ("c", {}))
    ]
    proxy.train()
    proxy.post(tools=tools)
    proxy.post(tools=tools[1:])
    proxy.post(tools=tools, headers={"X-AGL-Train": "0"})
    proxy.serve_all("val", POLICY)
    proxy.post(tools=tools)
    loose = {**tools[0], "function": {**tools[0]["function"], "strict": False}}
    assert [body["tools"] for body in fake.bodies()] == [
        [loose, *tools[1:]],
        tools[1:],
        tools,
        tools,
    ]
    assert proxy.counts["sampling_overridden"] == 1
    assert proxy.counts["sampling_overridden.tools.function.strict"] == 1


def test_seeds_of_training_requests_are_counted_and_left(fake, proxy, caplog):
    proxy.train()
    for headers in (None, {"X-AGL-Train": "0"}, None):
        proxy.post(seed=7, headers=headers)
    proxy.serve_all("val", POLICY)
    proxy.post(seed=7)
    assert [body["seed"] for body in fake.bodies()] == [7] * 4
    assert proxy.counts["seeded"] == 2
    assert len([record for record in caplog.records if "seed" in record.message]) == 1


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url"])
def test_what_rows_cannot_hold_is_refused_in_training_only(fake, proxy, kind):
    content = [{"type": "text", "text": "what is it?"}, {"type": kind, kind: {"url": "data:,"}}]
    messages = [{"role": "user", "content": content}]
    proxy.train()
    refused = proxy.post(messages=messages)
    assert refused.status_code == 400
    assert kind in refused.json()["error"]["message"]
    assert "X-AGL-Train" in refused.json()["error"]["message"]
    assert fake.requests == []
    assert proxy.post(messages=messages, headers={"X-AGL-Train": "0"}).status_code == 200
    proxy.serve_all("val", POLICY)
    assert proxy.post(messages=messages).status_code == 200


def test_parts_of_text_are_trained(fake, proxy):
    proxy.train()
    content = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert proxy.post(messages=[{"role": "user", "content": content}]).status_code == 200
    assert proxy.counts["recorded"] == 1


def test_sampling_allowed_to_agents(fake, proxy):
    proxy.train(enforce=False)
    proxy.post(temperature=0.2)
    body = fake.bodies()[0]
    assert (body["temperature"], body["top_p"], body["top_k"]) == (0.2, 0.9, -1)
    assert proxy.counts["sampling_deviating.temperature"] == 1
    assert proxy.take()[0].call.sampling["temperature"] == 0.2


def test_validation_keeps_what_agents_ask_for(fake, proxy):
    proxy.serve_all("val", replace(POLICY, temperature=0.0), 4)
    proxy.post(temperature=0.7)
    proxy.post()
    assert [body["temperature"] for body in fake.bodies()] == [0.7, 0.0]
    assert proxy.counts == {"recorded": 2}


def test_not_trainable(fake, proxy):
    proxy.train()
    proxy.post(headers={"X-AGL-Train": "0"}, temperature=0.0)
    assert not proxy.take()[0].call.trainable
    assert fake.bodies()[0]["temperature"] == 0.0
    assert "X-AGL-Train" not in fake.requests[0].headers
    assert proxy.counts == {"recorded": 1, "not_trainable": 1}
    assert proxy.post(headers={"X-AGL-Train": "maybe"}).status_code == 400


def test_max_tokens_only_where_there_is_none(fake, proxy):
    proxy.train(max_tokens=16)
    proxy.post()
    proxy.post(max_tokens=3)
    proxy.post(max_completion_tokens=4)
    proxy.post("/completions")
    assert [body.get("max_tokens") for body in fake.bodies()] == [16, 3, None]
    assert "max_tokens" not in fake.bodies("/v1/completions")[0]
    assert proxy.counts["max_tokens_capped"] == 1


def test_max_tokens_of_ours_never_makes_a_prompt_too_long(fake, proxy):
    message = "This model's maximum context length is 32 tokens. However, you requested 16 output"
    refusal = Answer(status=400, error_body={"error": {"message": message}})
    fake.answer_next(refusal)
    proxy.train(max_tokens=16)
    assert proxy.post().status_code == 200
    assert [body.get("max_tokens") for body in fake.bodies()] == [16, None]
    assert "max_tokens" not in proxy.take()[0].call.sampling
    fake.answer_next(Answer(status=400))
    assert proxy.post().json()["error"]["message"] == "scripted"
    fake.answer_next(refusal, refusal)
    assert proxy.post().json() == {"error": {"message": message}}
    assert proxy.counts["max_tokens_cap_lifted"] == 2


def test_only_the_taken_attempt_counts(fake, proxy):
    proxy.post(attempt="at-1")
    proxy.post(attempt="at-2")
    proxy.post(attempt="at-2")
    assert len(proxy.take(attempt="at-2")) == 2
    assert proxy.take(attempt="at-2") == []
    proxy.server.recorder.discard("ro-1")
    assert proxy.take(attempt="at-1") == []


def test_one_response_id_is_one_call(fake, proxy):
    fake.respond = lambda request: Answer(response_id="chatcmpl-same")
    proxy.post()
    proxy.post()
    assert len(proxy.take()) == 1
    assert proxy.counts == {"recorded": 1, "duplicates": 1, "duplicate_tokens": 3}


def test_log_probs_that_do_not_fit_are_left_out(fake, proxy):
    fake.answer_next(Answer(without=frozenset({"logprobs"})))
    proxy.post()
    assert proxy.take()[0].call.log_probs is None
    assert proxy.counts == {"recorded": 1, "without_log_probs": 1}


def test_sequence_is_the_store_s_and_orders_the_calls(fake, proxy):
    numbers = iter([30, 10, 20])

    async def next_sequence(rollout_id: str, attempt_id: str) -> int:
        assert (rollout_id, attempt_id) == ("ro-1", "at-1")
        return next(numbers)

    proxy.server.next_sequence = next_sequence
    for _ in range(3):
        proxy.post()
    assert [recorded.sequence for recorded in proxy.take()] == [10, 20, 30]
