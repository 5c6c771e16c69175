"""What of an agent's request reaches the server, in training, validation and for a judge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import openai
import pytest

from agl_fast.proxy.engines import vllm
from agl_fast.proxy.engines.vllm import CHAT, COMPLETIONS, EXPLICIT, FIELDS, NEUTRAL
from agl_fast.proxy.sampling import Phase, bent_by
from support.fake_openai_server import Answer, FakeOpenAIServer
from support.running_proxy import POLICY, RunningProxy, running_proxy, say

JUDGE = {"X-AGL-Train": "0"}
PATHS = {CHAT: "/chat/completions", COMPLETIONS: "/completions"}
# A value with an effect, of each field that training replaces, counts or refuses.
VALUES = {
    "min_p": 0.2,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "min_tokens": 4,
    "ignore_eos": True,
    "thinking_token_budget": 3,
    "logit_bias": {"5": 10.0},
    "bad_words": ["no"],
    "allowed_token_ids": [1, 2],
    "structured_outputs": {"regex": "a+"},
    "response_format": {"type": "json_object"},
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "vllm_xargs": {"processor": 1},
    "use_beam_search": True,
    "kv_transfer_params": {"do_remote_prefill": True},
    "ec_transfer_params": {"a": 1},
    "prompt_embeds": "AAAA",
    "echo": True,
}


def cases(treatment: str) -> list[tuple[str, str]]:
    return [
        (path, name)
        for endpoint, path in PATHS.items()
        for name, field in FIELDS[endpoint].items()
        if field.treatment == treatment
    ]


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[FakeOpenAIServer, RunningProxy]]:
    with FakeOpenAIServer() as fake, running_proxy(fake) as proxy:
        yield fake, proxy


@pytest.fixture
def fake(shared) -> FakeOpenAIServer:
    server, _ = shared
    server.requests.clear()
    server.respond = lambda request: Answer()
    return server


@pytest.fixture
def proxy(shared) -> RunningProxy:
    _, running = shared
    running.server.recorder.forget_all_but()
    running.server.recorder.reset_counts()
    running.server.announced.close(running.server.announced.ids)
    running.train()
    return running


def validate(proxy: RunningProxy) -> None:
    proxy.serve_all("val", replace(POLICY, temperature=0.0))


def only_body(fake: FakeOpenAIServer) -> dict:
    (request,) = fake.requests
    return request.body


@pytest.mark.parametrize("path", PATHS.values())
@pytest.mark.parametrize("phase", ["train", "allow", "val"])
def test_every_call_states_what_generation_config_json_would_fill_in(fake, proxy, path, phase):
    if phase == "val":
        validate(proxy)
    elif phase == "allow":
        proxy.train(enforce=False)
    proxy.post(path, min_p=None, top_k=None)
    body = only_body(fake)
    assert body["temperature"] == (0.0 if phase == "val" else 1.0)
    assert (body["top_p"], body["top_k"]) == (0.9, -1)
    assert {name: body[name] for name in EXPLICIT} == EXPLICIT
    assert proxy.take()[0].call.sampling.keys() == {"temperature", "top_p", "top_k"}
    assert proxy.counts["recorded"] == 1
    assert [name for name in proxy.counts if name.startswith("sampling")] == []


@pytest.mark.parametrize(("path", "name"), cases("neutral"))
def test_training_replaces_what_bends_the_distribution(fake, proxy, path, name):
    proxy.post(path, **{name: VALUES[name]})
    assert only_body(fake).get(name) == EXPLICIT.get(name)
    assert proxy.counts[f"sampling_overridden.{name}"] == 1
    assert bent_by(proxy.take()[0].call.sampling, vllm) == []


@pytest.mark.parametrize(("path", "name"), cases("neutral"))
def test_training_that_leaves_sampling_to_agents_counts_it(fake, proxy, path, name):
    proxy.train(enforce=False)
    proxy.post(path, **{name: VALUES[name]})
    assert only_body(fake)[name] == VALUES[name]
    assert proxy.counts[f"sampling_deviating.{name}"] == 1
    assert bent_by(proxy.take()[0].call.sampling, vllm) == [name]


@pytest.mark.parametrize("enforce", [True, False])
@pytest.mark.parametrize(("path", "name"), cases("form"))
def test_the_form_of_an_answer_is_the_agent_s_and_counted(fake, proxy, path, name, enforce, caplog):
    proxy.train(enforce=enforce)
    proxy.server._notices._said.clear()
    proxy.post(path, **{name: VALUES[name]})
    assert only_body(fake)[name] == VALUES[name]
    assert proxy.counts["sampling_unenforced"] == 1
    assert proxy.counts[f"sampling_unenforced.{name}"] == 1
    assert f"Agents set {name}" in caplog.text
    assert bent_by(proxy.take()[0].call.sampling, vllm) == [name]


@pytest.mark.parametrize(("path", "name"), cases("refused"))
def test_what_rows_cannot_be_of_is_refused_in_training(fake, proxy, path, name):
    refused = proxy.post(path, **{name: VALUES[name]})
    assert refused.status_code == 400
    assert refused.headers["x-should-retry"] == "false"
    assert refused.json()["error"]["message"].startswith(f"{name} in a call that is trained: ")
    assert "X-AGL-Train: 0" in refused.json()["error"]["message"]
    assert fake.requests == []
    assert proxy.counts == {"bad_requests": 1}


@pytest.mark.parametrize("who", ["judge", "validation"])
@pytest.mark.parametrize(
    ("path", "name"), [*cases("neutral"), *cases("form"), *cases("refused"), *cases("run")]
)
def test_calls_that_are_not_trained_may_use_everything(fake, proxy, path, name, who):
    if who == "validation":
        validate(proxy)
    value = VALUES.get(name, 0.5)
    headers = JUDGE if who == "judge" else None
    assert proxy.post(path, headers=headers, **{name: value}).status_code == 200
    body = only_body(fake)
    assert body[name] == value
    if who == "judge":
        assert not EXPLICIT.keys() & body.keys() - {name}
    assert not any(counted.startswith("sampling") for counted in proxy.counts)


@pytest.mark.parametrize("headers", [None, JUDGE])
@pytest.mark.parametrize("path", PATHS.values())
@pytest.mark.parametrize("stream", [False, True])
def test_no_field_of_an_agent_s_names_its_answers(fake, proxy, path, stream, headers):
    """vLLM names an answer by request_id: three answers, one id, two of them duplicates."""
    fake.respond = lambda request: Answer(response_id=request.body.get("request_id"))
    for _ in range(3):
        proxy.post(path, request_id="conv-7", stream=stream, headers=headers)
    calls = proxy.take()
    assert len({each.call.response_id for each in calls}) == 3
    assert sum(len(each.call.response_ids) for each in calls) == 9
    assert "duplicates" not in proxy.counts
    assert proxy.counts["fields_replaced.request_id"] == 3


def test_reasoning_is_included_as_its_ids_would_be_missing(fake, proxy):
    proxy.post(include_reasoning=False)
    proxy.post(include_reasoning=True)
    proxy.post()
    assert [body.get("include_reasoning") for body in fake.bodies()] == [True, True, None]
    assert proxy.counts["fields_replaced.include_reasoning"] == 1


@pytest.mark.parametrize("max_tokens", [0, 0.0, "0"])
@pytest.mark.parametrize("echo", [True, 1, "true"])
def test_scoring_a_text_samples_nothing_and_trains_nothing(fake, proxy, echo, max_tokens):
    answer = proxy.post("/completions", echo=echo, max_tokens=max_tokens, logprobs=1)
    assert answer.status_code == 200
    assert only_body(fake) == {
        "model": "policy",
        "prompt": "hi",
        "echo": echo,
        "max_tokens": max_tokens,
        "logprobs": 1,
    }
    assert proxy.take() == []
    assert proxy.counts == {"unrecorded": 1}


def test_an_echo_that_is_not_trained_goes_through_as_it_is(fake, proxy):
    proxy.post("/completions", echo=True, max_tokens=5, headers=JUDGE)
    assert "return_token_ids" not in only_body(fake)
    assert proxy.counts == {"unrecorded": 1}


def test_an_echo_of_chat_is_of_the_text_alone(fake, proxy):
    assert proxy.post(echo=True).status_code == 200
    assert only_body(fake)["echo"] is True
    assert len(proxy.take()) == 1


def test_fields_that_vllm_does_not_know_go_out_and_are_counted(fake, proxy, caplog):
    for _ in range(2):
        proxy.post(guided_json={"type": "object"}, temprature=0.3)
    assert fake.bodies()[0]["temprature"] == 0.3
    assert proxy.counts["fields_unknown"] == 2
    assert caplog.text.count("'guided_json'") == 1
    assert caplog.text.count("'temprature'") == 1
    proxy.post(**{f"made_up_{i}": 1 for i in range(100)})
    assert caplog.text.count("made_up_") < 40


@pytest.mark.parametrize("strict", [True, 1, "true"])
def test_strict_tools_as_vllm_reads_them(fake, proxy, strict):
    function = {"name": "a", "parameters": {}, "strict": strict}
    proxy.post(tools=[{"type": "function", "function": function}])
    assert only_body(fake)["tools"][0]["function"]["strict"] is False
    proxy.train(enforce=False)
    proxy.post(tools=[{"type": "function", "function": function}])
    assert fake.bodies()[1]["tools"][0]["function"]["strict"] == strict
    assert proxy.counts["sampling_unenforced.tools.function.strict"] == 1
    loose, bent = proxy.take()
    assert bent_by(loose.call.sampling, vllm) == []
    assert bent_by(bent.call.sampling, vllm) == ["tools.function.strict"]


@pytest.mark.parametrize("n", [2, 2.0, "2"])
@pytest.mark.parametrize("path", PATHS.values())
def test_all_choices_of_a_stream_are_calls_however_n_is_written(fake, proxy, path, n):
    fake.respond = lambda request: Answer()
    original = fake._parts
    fake._parts = lambda request, answer: original(
        replace(request, body={**request.body, "n": int(float(n))}), answer
    )
    try:
        proxy.post(path, n=n, stream=True)
    finally:
        fake._parts = original
    assert [each.call.response_ids.tolist() for each in proxy.take()] == [
        [11, 12, 13],
        [12, 13, 14],
    ]


IMAGE = {"url": "data:,"}
MEDIA = [
    {"type": "image_url", "image_url": IMAGE},
    {"image_url": IMAGE},
    {"image_url": "data:,"},
    {"image_url": None, "uuid": "cached"},
    {"image": "data:,"},
    {"image_pil": "x"},
    {"image_embeds": "AAAA"},
    {"type": "image", "source": {"type": "base64"}},
    {"type": "input_image", "image_url": "data:,"},
    {"input_audio": {"data": "", "format": "wav"}},
    {"audio_url": {"url": "data:,"}},
    {"video_url": {"url": "data:,"}},
    {"type": "prompt_embeds", "data": "AAAA"},
    {"prompt_embeds": "AAAA"},
    [{"image_url": IMAGE}],
    {"type": "tool_result", "content": [{"image_url": IMAGE}]},
    {"type": "text", "text": "a", "image_url": IMAGE},
]


@pytest.mark.parametrize("role", ["user", "tool", "system"])
@pytest.mark.parametrize("part", MEDIA, ids=str)
def test_media_are_refused_by_what_a_part_holds(fake, proxy, part, role):
    content = [{"type": "text", "text": "look"}, part]
    messages = [*say("hi"), {"role": role, "content": content}]
    refused = proxy.post(messages=messages)
    assert refused.status_code == 400
    assert "training rows hold text only" in refused.json()["error"]["message"]
    assert fake.requests == []


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "a", "image_url": None},
        {"type": "text", "text": "an image", "caption": "of audio"},
        {"type": "refusal", "refusal": "no"},
        {"text": "a"},
        "a",
    ],
    ids=str,
)
def test_text_is_trained_whatever_a_client_writes_beside_it(fake, proxy, part):
    messages = [{"role": "user", "content": [part]}]
    fake.respond = lambda request: Answer(prompt_token_ids=[1])
    assert proxy.post(messages=messages).status_code == 200
    assert proxy.counts["recorded"] == 1


def test_a_404_names_the_model_to_ask_for(fake, proxy):
    fake.respond = lambda request: Answer(status=404)
    refused = proxy.post(model="gpt-4o")
    assert refused.status_code == 404
    assert refused.json()["error"]["message"] == (
        "the servers know no model 'gpt-4o': ask for 'policy', the `model` of the resource main_llm"
    )
    misnamed = proxy.post(model="policy").json()["error"]["message"]
    assert "served_model_name" in misnamed
    assert "'policy'" in misnamed
    assert proxy.counts == {"client_errors": 2, "unknown_models": 2}
    assert set(proxy.server.announced.others.unknown_models.values()) == {1}


def test_rollouts_that_are_not_in_the_batch_are_refused(fake, proxy):
    proxy.server.announced.announce(["ro-1"], Phase("train", POLICY), 3)
    proxy.server.announced.others = None
    assert proxy.post(attempt="a retry").status_code == 200
    refused = proxy.post(rollout="ro-of-somebody")
    assert refused.status_code == 404
    assert "'ro-of-somebody'" in refused.json()["error"]["message"]
    assert refused.headers["x-should-retry"] == "false"
    assert len(fake.requests) == 1
    assert proxy.counts == {"recorded": 1, "unknown_rollouts": 1}
    assert proxy.post(rollout=None).status_code == 200  # names none: not recorded


@pytest.mark.parametrize("place", ["rollout", "attempt"])
@pytest.mark.parametrize("name", ["a%0Ab", "a%0D%0Ab", "a%00b", "a%1B[31mb", "a%C2%85b", "a%FFb"])
def test_ids_that_would_forge_a_log_are_refused(fake, proxy, place, name):
    refused = proxy.post(**{place: name})
    assert refused.status_code == 400
    assert f"the {place} id" in refused.json()["error"]["message"]
    assert fake.requests == []
    assert proxy.counts == {"bad_requests": 1}


@pytest.mark.parametrize("name", [b"caf\xe9", "a\x85b".encode(), "a\u2028b".encode()])
def test_names_of_agents_that_would_break_a_recording_are_refused(fake, proxy, name):
    refused = proxy.post(headers={"X-AGL-Agent": name})
    assert refused.status_code == 400
    assert "X-AGL-Agent" in refused.json()["error"]["message"]
    assert fake.requests == []


BEAMS = {"messages": say("hi"), "use_beam_search": True}
HI = {"messages": say("hi")}


@pytest.mark.parametrize(
    ("status", "path", "body", "counted", "attempts"),
    [
        (501, "/responses", {"input": "hi"}, "not_supported", 1),
        (400, "/chat/completions", BEAMS, "bad_requests", 1),
        (504, "/chat/completions", HI, "timeouts", 1),
        (502, "/chat/completions", HI, "without_token_ids", 1),
        (503, "/chat/completions", HI, "server_errors", 3),
    ],
)
def test_openai_s_client_retries_where_it_can_help(fake, status, path, body, counted, attempts):
    """502: the only server has no ids. 503: vLLM's own answer."""
    fake.respond = {
        502: lambda request: Answer(without=frozenset(["token_ids"])),
        503: lambda request: Answer(status=503, headers={"retry-after-ms": "1"}),
        504: lambda request: Answer(delay=5.0),
    }.get(status, fake.respond)
    with running_proxy(fake, timeout_seconds=0.5 if status == 504 else 10.0) as proxy:
        proxy.train()
        with (
            openai.OpenAI(base_url=proxy.base_url(), api_key="none") as client,
            pytest.raises(openai.APIStatusError) as caught,
        ):
            client.post(path, body={"model": "policy", **body}, cast_to=object)
        assert caught.value.status_code == status
        assert proxy.counts[counted] == attempts


def test_a_501_of_the_server_s_is_not_tried_again(fake, proxy):
    fake.respond = lambda request: Answer(status=501)
    assert proxy.post().headers["x-should-retry"] == "false"


def test_missing_ids_are_worth_a_retry_where_there_is_another_server(fake, proxy):
    fake.respond = lambda request: Answer(without=frozenset(["token_ids"]))
    with FakeOpenAIServer() as other:
        proxy.serve_from(fake, other)
        other.respond = fake.respond
        assert "x-should-retry" not in proxy.post().headers
    proxy.serve_from(fake)
    assert proxy.post().headers["x-should-retry"] == "false"


def test_every_value_has_an_effect():
    for endpoint in PATHS:
        for name, field in FIELDS[endpoint].items():
            if field.treatment in ("neutral", "form", "refused"):
                assert VALUES[name] not in field.without_effect
    assert set(NEUTRAL) <= set(VALUES)


OFF = [False, 0, 0.0, "false", "False", "0", "no", "off", "n", "f", None]
ON = [True, 1, 1.0, "true", "TRUE", "1", "yes", "on", "y", "t"]


@pytest.mark.parametrize("value", OFF, ids=repr)
def test_switches_that_are_off_change_nothing(fake, proxy, value):
    """However they are written: vLLM's request classes read strings and numbers, too."""
    for path, name in ((PATHS[COMPLETIONS], "echo"), (PATHS[CHAT], "use_beam_search")):
        assert proxy.post(path, **{name: value}).status_code == 200
    proxy.train(enforce=False)
    proxy.post(ignore_eos=value, tools=[{"function": {"name": "f", "strict": value}}])
    assert [name for name in proxy.counts if name.startswith("sampling")] == []
    assert all(bent_by(each.call.sampling, vllm) == [] for each in proxy.take())
    assert proxy.counts["recorded"] == 3


@pytest.mark.parametrize("value", ON, ids=repr)
def test_switches_that_are_on(fake, proxy, value):
    for path, name in ((PATHS[COMPLETIONS], "echo"), (PATHS[CHAT], "use_beam_search")):
        assert proxy.post(path, **{name: value}).status_code == 400
    proxy.train(enforce=False)
    proxy.post(ignore_eos=value)
    assert proxy.counts["sampling_deviating.ignore_eos"] == 1


@pytest.mark.parametrize(
    ("name", "same", "other"),
    [
        ("temperature", ["1", "1.0", " 1e0 ", 1, True], ["0.5", "hot", [1.0], {"a": 1}, "nan"]),
        ("top_p", ["0.9", 0.9], ["0.90001", {}]),
        ("top_k", ["-1", "0", 0, -1.0, False], ["5", [-1], "many"]),
        ("min_p", ["0", "0.0", 0, False], ["0.1", True, []]),
        ("repetition_penalty", ["1", True], ["1.1", [1]]),
        ("min_tokens", ["0", 0.0], ["1", [0]]),
        ("thinking_token_budget", ["-1", -1.0], ["-2", 0]),
    ],
)
def test_numbers_are_compared_as_vllm_reads_them(fake, proxy, name, same, other):
    for value in same:
        assert proxy.post(**{name: value}).status_code == 200
    assert not any(each.startswith("sampling") for each in proxy.counts)
    for value in other:
        assert proxy.post(**{name: value}).status_code == 200
    assert proxy.counts[f"sampling_overridden.{name}"] == len(other)
    proxy.train(enforce=False)
    for value in [*same, *other]:
        proxy.post(**{name: value})
    assert proxy.counts[f"sampling_deviating.{name}"] == len(other)


@pytest.mark.parametrize(
    "options",
    ["x", [], [{"include_usage": True}], 5, True, {"include_usage": []}, {"a": {"b": [None]}}],
    ids=repr,
)
def test_stream_options_in_odd_types(fake, proxy, options):
    """The server decides; the rest of the answer is recorded as ever."""
    fake.respond = lambda request: Answer(status=200 if is_mapping(request) else 400)

    def is_mapping(request) -> bool:
        return isinstance(request.body["stream_options"], dict)

    answer = proxy.post(stream=True, stream_options=options)
    assert answer.status_code == (200 if isinstance(options, dict) else 400)
    sent = only_body(fake)["stream_options"]
    if isinstance(options, dict):
        assert sent == {**options, "include_usage": True, "continuous_usage_stats": False}
        assert len(proxy.take()) == 1
    else:
        assert sent == options


@pytest.mark.parametrize(
    "odd",
    [
        {"best_of": 3},
        {"n": None, "early_stopping": True, "beam_width": 2},
        {"extra_body": {"return_token_ids": False, "temperature": 0.1}},
        {"guided_json": {"type": "object"}},
        {"logits_processors": ["os.system"]},
        {"": 1},
        {"Temperature": 0.1},
        {"temperature ": 0.1},
    ],
    ids=repr,
)
def test_fields_of_other_servers_are_counted_and_bend_nothing(fake, proxy, odd):
    assert proxy.post(**odd).status_code == 200
    assert proxy.counts["fields_unknown"] == 1
    body = only_body(fake)
    assert (body["temperature"], body["return_token_ids"]) == (1.0, True)
    assert {name: body[name] for name in odd} == odd
    assert len(proxy.take()) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"return_token_ids": False},
        {"return_token_ids": "no", "logprobs": {}, "top_logprobs": None},
        {"logprobs": None, "include_reasoning": 0},
        {"logprobs": [], "include_reasoning": "off"},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"truncate_prompt_tokens": 1, "truncation_side": "left", "cache_salt": "s"},
        {"return_tokens_as_token_ids": True, "logprob_token_ids": [5], "prompt_logprobs": 0},
        {"tool_choice": "none", "parallel_tool_calls": False},
        {"kv_transfer_params": {}, "ec_transfer_params": None, "vllm_xargs": {}},
        {"response_format": {"type": "text"}, "structured_outputs": None, "logit_bias": {}},
        {"max_tokens": None, "max_completion_tokens": None, "min_tokens": None, "n": None},
        {"messages": [{"role": "user", "content": ["hi", {"type": "text", "text": "there"}]}]},
        {"messages": [{"role": "tool", "content": [[], [[{"text": "x"}]], None]}]},
    ],
    ids=repr,
)
def test_what_bends_nothing_is_recorded_without_a_word(fake, proxy, fields):
    fake.respond = lambda request: Answer(prompt_token_ids=[1])
    assert proxy.post(**fields).status_code == 200
    body = only_body(fake)
    asked = (body["return_token_ids"], body["logprobs"], body["top_logprobs"])
    assert asked == (True, True, 0)
    assert body.get("include_reasoning", True) is True
    (recorded,) = proxy.take()
    assert bent_by(recorded.call.sampling, vllm) == []
    assert not any(each.startswith("sampling") for each in proxy.counts)


def test_a_body_that_is_nested_too_deeply(fake, proxy):
    """Wherever the depth is met: in reading, in looking for media, in writing, in a log."""
    for n in (300, 900, 970, 985, 1000, 30_000):
        nested = "[" * n + "]" * n
        for name in ("messages", "temperature", "response_format", "metadata", "tools"):
            answer = proxy.client.post(
                proxy.base_url() + PATHS[CHAT],
                content=f'{{"model":"policy","messages":[],"{name}":{nested}}}',
                headers={"Content-Type": "application/json"},
            )
            assert answer.status_code in (200, 400), (n, name)
            if answer.status_code == 400:
                assert "not a JSON object" in answer.json()["error"]["message"]
    assert "proxy_errors" not in proxy.counts
    assert proxy.post().status_code == 200


def test_names_of_models_in_odd_types(fake, proxy):
    fake.respond = lambda request: Answer(status=404)
    for model in (["policy"], {"id": "policy"}, 5, True, "", "x" * 1000, "a\nb\x1b[31m"):
        answer = proxy.post(model=model)
        assert answer.status_code == 404
        message = answer.json()["error"]["message"]
        assert message.startswith("the servers know no model ")
        assert len(message) < 200
        assert message.isprintable()
