"""What an answer may say: everything else is refused, whole or streamed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_fast.proxy.answer_checks import Asked, BadAnswerError, ModelLimits
from agl_fast.proxy.answers import AnswerCollector, Choice, read_answer
from agl_fast.proxy.engines import vllm
from agl_fast.proxy.engines.base import CHAT, COMPLETIONS
from agl_fast.proxy.events import EventReader
from support.answer_events import chat, event, role, text, token, usage


def completion(*values: float | None) -> dict[str, Any]:
    return {"token_logprobs": list(values)}


def body(*choices: dict[str, Any], **more: Any) -> bytes:
    whole = [{"index": n, "finish_reason": "stop", **each} for n, each in enumerate(choices)]
    return json.dumps({"id": "x", "prompt_token_ids": [1, 2], "choices": whole, **more}).encode()


def refusal(answer: bytes, *args: Any) -> BadAnswerError:
    with pytest.raises(BadAnswerError) as caught:
        read_answer(answer, vllm, *args)
    return caught.value


def one(answer: bytes, *args: Any) -> Choice:
    _, (choice,) = read_answer(answer, vllm, *args)
    return choice


@pytest.mark.parametrize(
    ("choice", "more", "cause", "words"),
    [
        ({"token_ids": [11, 12, 13], "logprobs": chat(-1, -2, -3, -4, -5)}, {}, "log_probs", "5 3"),
        ({"token_ids": [1], "logprobs": chat(-1, -2)}, {}, "log_probs", "2 1"),
        ({"token_ids": [1, 2], "logprobs": completion(-1)}, {}, "log_probs", "1 2"),
        ({"token_ids": [], "logprobs": chat(-1)}, {}, "log_probs", "1 0"),
        ({"token_ids": [1]}, {"usage": {"completion_tokens": 5}}, "usage", "5 1"),
        ({"token_ids": [1, 2]}, {"usage": {"completion_tokens": 1}}, "usage", "1 2"),
        ({"token_ids": [1], "logprobs": chat(1e300)}, {}, "log_probs", "token 0 1e+300"),
        ({"token_ids": [1], "logprobs": chat(-1e39)}, {}, "log_probs", "token 0 -1e+39"),
        ({"token_ids": [5, 6], "logprobs": chat(-1, float("nan"))}, {}, "log_probs", "token 1 nan"),
        ({"token_ids": [5], "logprobs": chat(float("-inf"))}, {}, "log_probs", "token 0 -inf"),
        ({"token_ids": [5], "logprobs": completion(float("inf"))}, {}, "log_probs", "token 0 inf"),
        ({"token_ids": [5], "logprobs": {"content": [{"logprob": "-1"}]}}, {}, "log_probs", "'-1'"),
        ({"token_ids": [5], "logprobs": {"token_logprobs": [True]}}, {}, "log_probs", "0 True"),
        ({"token_ids": [5], "logprobs": {"content": [{"logprob": [1]}]}}, {}, "log_probs", "list"),
        ({"token_ids": [1, -2]}, {}, "token_ids", "choice 0 token_ids"),
        ({"token_ids": [2**31]}, {}, "token_ids", "2147483648"),
        ({"token_ids": [1.5]}, {}, "token_ids", "choice 0"),
        ({"token_ids": [True]}, {}, "token_ids", "choice 0"),
        ({"token_ids": [1], "prompt_token_ids": [False]}, {}, "token_ids", "prompt_token_ids"),
        ({"token_ids": None}, {}, "token_ids", "choice 0 lacks token_ids"),
        ({"token_ids": None, "message": {"content": "hi"}}, {}, "token_ids", "choice 0 text 0 ids"),
        ({"token_ids": [1]}, {"prompt_token_ids": None}, "token_ids", "lacks prompt_token_ids"),
        ({"token_ids": [1], "index": 1}, {}, "choices", "[1]"),
        ({"token_ids": [1], "finish_reason": 3}, {}, "unreadable", "finish_reason"),
        ({"token_ids": [1], "finish_reason": ["stop"]}, {}, "unreadable", "finish_reason"),
        ({"token_ids": [1], "stop_reason": {}}, {}, "unreadable", "stop_reason"),
        ({"token_ids": [1], "index": "0"}, {}, "unreadable", "index"),
        ({"token_ids": [1], "index": True}, {}, "unreadable", "index"),
        ({"token_ids": [1], "index": -1}, {}, "choices", "-1"),
        ({"token_ids": [1], "index": 10**30}, {}, "choices", "choices"),
        ({"token_ids": "1, 2"}, {}, "token_ids", "choice 0 token_ids"),
        ({"token_ids": {"0": 1}}, {}, "token_ids", "choice 0 token_ids"),
        ({"token_ids": [[1]]}, {}, "token_ids", "choice 0 token_ids"),
        ({"token_ids": ["1"]}, {}, "token_ids", "choice 0 token_ids"),
        ({"token_ids": [None]}, {}, "token_ids", "choice 0 token_ids"),
        ({"token_ids": [1e1]}, {}, "token_ids", "choice 0 token_ids"),
        ({"token_ids": [], "text": "hello"}, {}, "token_ids", "choice 0 text 0 ids"),
        ({"token_ids": [], "message": {"content": "hi"}}, {}, "token_ids", "choice 0 text 0 ids"),
        ({"token_ids": [], "message": {"tool_calls": [{}]}}, {}, "token_ids", "choice 0 text"),
        ({"token_ids": None, "message": "hello"}, {}, "token_ids", "choice 0 text 0 ids"),
        ({"token_ids": None, "message": ["hello"]}, {}, "token_ids", "choice 0 text 0 ids"),
        ({"token_ids": None, "logprobs": chat(-1)}, {}, "log_probs", "1 log-probs without"),
        ({"token_ids": [1], "logprobs": [-1.0]}, {}, "unreadable", "logprobs"),
        ({"token_ids": [1], "logprobs": "x"}, {}, "unreadable", "logprobs"),
        ({"token_ids": [1], "logprobs": True}, {}, "unreadable", "logprobs"),
        ({"token_ids": [1], "logprobs": {"content": [None]}}, {}, "unreadable", "content"),
        ({"token_ids": [1], "logprobs": {"content": {"logprob": -1}}}, {}, "unreadable", "content"),
        ({"token_ids": [1], "logprobs": chat("NaN")}, {}, "log_probs", "token 0 'NaN'"),
        ({"token_ids": [1], "logprobs": chat(False)}, {}, "log_probs", "token 0 False"),
        ({"token_ids": [1], "logprobs": completion("-0.5")}, {}, "log_probs", "token 0 '-0.5'"),
        ({"token_ids": [1]}, {"usage": {"completion_tokens": -1}}, "usage", "-1 1 came"),
        ({"token_ids": [1]}, {"usage": {"completion_tokens": 10**30}}, "usage", "1 came"),
        ({"token_ids": [1]}, {"usage": {"completion_tokens": "1"}}, "unreadable", "usage"),
        ({"token_ids": [1]}, {"usage": {"completion_tokens": True}}, "unreadable", "usage"),
        ({"token_ids": [1]}, {"usage": {"completion_tokens": 1.5}}, "unreadable", "usage"),
        ({"token_ids": [1]}, {"usage": [1]}, "unreadable", "usage"),
        ({"token_ids": [1], "prompt_token_ids": [7]}, {}, None, ""),
        ({"token_ids": [1]}, {"prompt_token_ids": "1"}, "token_ids", "prompt_token_ids"),
        ({"token_ids": [1]}, {"prompt_token_ids": [-1]}, "token_ids", "prompt_token_ids"),
        ({"token_ids": [1]}, {"id": 7}, "unreadable", "id"),
        ({"token_ids": [1]}, {"id": None}, "unreadable", "id"),
        ({"token_ids": [1]}, {"choices": None}, "unreadable", "choices"),
        ({"token_ids": [1]}, {"choices": {}}, "unreadable", "choices"),
        ({"token_ids": [1]}, {"choices": []}, "choices", "no choices"),
        ({"token_ids": [1]}, {"choices": [[]]}, "unreadable", "choices"),
        ({"token_ids": [1]}, {"choices": [None]}, "unreadable", "choices"),
    ],
)
def test_what_is_refused(choice: Any, more: Any, cause: str | None, words: str) -> None:
    if cause is None:
        assert len(one(body(choice, **more)).response_ids) == 1
        return
    error = refusal(body(choice, **more))
    assert error.cause == cause
    for word in words.split():
        assert word in str(error)


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b"", b"{", b'{"id": "\xff", "choices": []}'])
def test_what_cannot_be_read(answer: bytes) -> None:
    assert refusal(answer).cause in ("unreadable", "choices")


@pytest.mark.parametrize("n", [100_000, 3_000_000])
@pytest.mark.parametrize("place", [b'{"id":"x","choices":[],"more":%b}', b'{"choices":%b}', b"%b"])
def test_what_is_nested_too_deeply(place: bytes, n: int) -> None:
    assert refusal(place % (b"[" * n + b"]" * n)).cause == "unreadable"


def test_a_large_answer_that_is_refused_is_named_as_a_small_one() -> None:
    text = "x" * 100_000
    for choice, cause, words in (
        ({"token_ids": [5], "logprobs": chat(float("nan"))}, "log_probs", "token 0 is nan"),
        ({"token_ids": [5], "logprobs": {"content": [{"logprob": "x"}]}}, "log_probs", "'x'"),
        ({"token_ids": None}, "token_ids", "choice 0 has text without token_ids"),
        ({"token_ids": [5] * 9, "logprobs": chat(*[-1] * 8)}, "log_probs", "8 log-probs came"),
    ):
        error = refusal(body({**choice, "message": {"content": text}}))
        assert (error.cause, words in str(error)) == (cause, True)


@pytest.mark.parametrize("n", [10**9, 10**30, 10**400, -5, "9", 2.5, True, [7]])
def test_tokens_of_a_refused_answer_are_those_that_can_be(n: Any) -> None:
    """The number goes into metrics: it is believed where a choice can have so many."""
    limits = ModelLimits(context_length=50)
    collector = AnswerCollector(vllm, None, limits)
    with pytest.raises(BadAnswerError):
        collector.read_whole(body({"token_ids": [1, 2]}, usage={"completion_tokens": n}))
    assert collector.n_sampled == 2
    collector = AnswerCollector(vllm, None, limits)
    with pytest.raises(BadAnswerError):
        collector.read_whole(body({"token_ids": [1, 2]}, usage={"completion_tokens": 50}))
    assert collector.n_sampled == 50


def test_a_choice_that_comes_twice() -> None:
    """Its ids would be put one behind the other."""
    first, second = {"token_ids": [1], "index": 0}, {"token_ids": [2], "index": 0}
    for choices in ((first, second), ({**first, "finish_reason": None}, second)):
        for asked in (Asked(), Asked(choices=2)):
            error = refusal(body(*choices), asked)
            assert error.cause == "choices"
            assert "choice 0 comes twice" in str(error)


def test_a_choice_without_index() -> None:
    """It is the only one, or it is not known whose ids these are."""
    answer = json.dumps(
        {"id": "x", "prompt_token_ids": [1], "choices": [{"token_ids": [5]}, {"token_ids": [6]}]}
    ).encode()
    assert refusal(answer, Asked(choices=2)).cause == "choices"
    assert refusal(answer).cause == "choices"
    alone = b'{"prompt_token_ids": [1], "choices": [{"token_ids": [5]}]}'
    assert one(alone).response_ids.tolist() == [5]
    events = [role(), role(1), token(1), {**token(2, **END), "choices": [token(2)["choices"][0]]}]
    del events[-1]["choices"][0]["index"]
    assert stream_refusal(events, Asked(choices=2)).cause == "choices"


@pytest.mark.parametrize("reason", ["banana", "", "content_filter", "\n"])
def test_a_finish_reason_that_vllm_does_not_know_is_kept(reason: str) -> None:
    assert one(body({"token_ids": [1], "finish_reason": reason})).finish_reason == reason


def test_an_error_with_status_200() -> None:
    assert "error" in str(refusal(b'{"error": {"message": "engine died"}}'))


def test_a_choice_is_named() -> None:
    good, bad = (
        {"token_ids": [1], "logprobs": chat(-1)},
        {"token_ids": [1], "logprobs": chat(-1, -1)},
    )
    assert "choice 1" in str(refusal(body(good, bad), Asked(choices=2)))


@pytest.mark.parametrize("n", [2, 3])
def test_too_few_choices(n: int) -> None:
    error = refusal(body({"token_ids": [1]}), Asked(choices=n))
    assert error.cause == "choices"
    assert str(n) in str(error)


def test_usage_is_of_all_choices() -> None:
    both = ({"token_ids": [1, 2]}, {"token_ids": [3]})
    asked = Asked(choices=2)
    _, choices = read_answer(body(*both, usage={"completion_tokens": 3}), vllm, asked)
    assert [len(each.response_ids) for each in choices] == [2, 1]
    assert refusal(body(*both, usage={"completion_tokens": 2}), asked).cause == "usage"


@pytest.mark.parametrize("usage", [None, {}, {"completion_tokens": None}, {"total_tokens": 9}])
def test_usage_that_says_nothing(usage: Any) -> None:
    assert one(body({"token_ids": [1, 2]}, usage=usage)).response_ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("values", "found", "why"),
    [
        ([-0.5, 0.0, -9998.0], [-0.5, 0.0, -9998.0], None),
        ([-0.5, -9999.0], None, "none"),
        ([-0.5, -12345.0], None, "none"),
        ([None, -0.5], None, "none"),
        ([0.25, -0.5], None, "positive"),
        ([1e30], None, "positive"),
        ([1e-7, -0.5], [0.0, -0.5], None),
        ([-1, 0], [-1.0, 0.0], None),
    ],
)
@pytest.mark.parametrize("form", [chat, completion])
def test_log_probs(form: Any, values: Any, found: Any, why: str | None) -> None:
    choice = one(body({"token_ids": [7] * len(values), "logprobs": form(*values)}))
    assert choice.missing_log_probs == why
    assert choice.log_probs is None if found is None else choice.log_probs.tolist() == found


@pytest.mark.parametrize("log_probs", [None, {}, {"content": None}, {"content": []}])
def test_answers_may_lack_log_probs(log_probs: Any) -> None:
    choice = one(body({"token_ids": [7, 8], "logprobs": log_probs}))
    assert (choice.log_probs, choice.missing_log_probs) == (None, "absent")


def test_vllm_leaves_the_log_prob_of_none_out_of_events() -> None:
    choice = one(body({"token_ids": [7], "logprobs": {"content": [{"token": "a"}]}}))
    assert (choice.log_probs, choice.missing_log_probs) == (None, "none")


@pytest.mark.parametrize(
    ("prompt", "response", "named"),
    [([1, 100], [2], "prompt_token_ids[1] is 100"), ([1], [2, 3, 150], "token_ids[2] is 150")],
)
def test_vocabulary(prompt: list[int], response: list[int], named: str) -> None:
    answer = body({"token_ids": response}, prompt_token_ids=prompt)
    error = refusal(answer, None, ModelLimits(vocabulary_size=100))
    assert error.cause == "vocabulary"
    assert named in str(error)
    assert "100 token ids" in str(error)
    assert one(answer, None, ModelLimits(vocabulary_size=151)).response_ids.tolist() == response
    assert one(answer).response_ids.tolist() == response


EOS = ModelLimits(context_length=50, end_ids=frozenset({9}))
CUT = ModelLimits(context_length=50, max_tokens=30, end_ids=frozenset({9}))


@pytest.mark.parametrize(
    ("n_ids", "last", "said", "stop_reason", "asked", "limits", "expected"),
    [
        (40, 1, "tool_calls", None, Asked(max_tokens=40), ModelLimits(), "length"),
        (40, 1, "tool_calls", None, Asked(max_tokens=40), EOS, "length"),
        (39, 1, "tool_calls", None, Asked(max_tokens=40), ModelLimits(), "tool_calls"),
        (48, 1, "tool_calls", None, Asked(), EOS, "length"),  # 2 + 48 fill the context
        (48, 1, "tool_calls", None, Asked(max_tokens=60), EOS, "length"),
        (40, 9, "tool_calls", None, Asked(max_tokens=40), EOS, "tool_calls"),
        (48, 9, "tool_calls", None, Asked(), EOS, "tool_calls"),
        (40, 9, "tool_calls", None, Asked(max_tokens=40, ignores_end=True), EOS, "length"),
        (40, 1, "tool_calls", 1, Asked(max_tokens=40), EOS, "tool_calls"),
        (40, 1, "tool_calls", "</s>", Asked(max_tokens=40), EOS, "tool_calls"),
        (40, 1, "tool_calls", "repetition_detected", Asked(max_tokens=40), EOS, "repetition"),
        (20, 1, "tool_calls", None, Asked(max_tokens=40), EOS, "abort"),
        (20, 9, "tool_calls", None, Asked(max_tokens=40), EOS, "tool_calls"),
        (20, 1, "tool_calls", None, Asked(), EOS, "tool_calls"),  # the server's own limit
        (40, 9, "stop", None, Asked(max_tokens=40), EOS, "stop"),
        # The servers cut answers at 30 tokens, whatever an agent asks for.
        (30, 1, "tool_calls", None, Asked(max_tokens=40), CUT, "length"),
        (30, 1, "tool_calls", None, Asked(), CUT, "length"),
        (30, 9, "tool_calls", None, Asked(max_tokens=40), CUT, "tool_calls"),
        (20, 1, "tool_calls", None, Asked(max_tokens=20), CUT, "length"),
        (20, 1, "tool_calls", None, Asked(), CUT, "abort"),
        (40, 1, "stop", "END", Asked(max_tokens=40), EOS, "stop"),
        (40, 1, "length", None, Asked(max_tokens=40), EOS, "length"),
        (3, 1, "abort", None, Asked(max_tokens=40), EOS, "abort"),
        (3, 1, None, None, Asked(max_tokens=3), EOS, None),
    ],
)
def test_finish_reason(
    n_ids: int, last: int, said: Any, stop_reason: Any, asked: Any, limits: Any, expected: Any
) -> None:
    """vLLM's order: an id that ends the text, then the limits, then an abort."""
    ids = [5] * (n_ids - 1) + [last]
    choice = {"token_ids": ids, "finish_reason": said, "stop_reason": stop_reason}
    assert one(body(choice), asked, limits).finish_reason == expected


@pytest.mark.parametrize(
    ("sent", "is_chat", "limit"),
    [
        ({"max_tokens": 7}, True, 7),
        ({"max_tokens": 7, "max_completion_tokens": 5}, True, 5),
        ({"max_completion_tokens": None, "max_tokens": 7}, True, 7),
        ({}, True, None),
        ({"max_tokens": "7"}, True, 7),
        ({"max_tokens": "many"}, True, None),
        ({}, False, 16),
        ({"max_tokens": None}, False, 16),
        ({"max_tokens": 3, "max_completion_tokens": 2}, False, 3),
    ],
)
def test_the_limit_that_a_request_sets(sent: Any, is_chat: bool, limit: Any) -> None:
    assert vllm.asked(sent, sent, CHAT if is_chat else COMPLETIONS, 1).max_tokens == limit


@pytest.mark.parametrize(
    ("asked", "choice", "found"),
    [
        (Asked(echo=True), {"token_ids": [7], "logprobs": completion(None, -1, -0.25)}, [-0.25]),
        (
            Asked(echo=True, repeats_text=True),
            {"token_ids": [], "logprobs": completion(None, -1)},
            [],
        ),
        (
            Asked(echo=True, max_tokens=0),
            {"token_ids": [7], "logprobs": completion(None, -1)},
            [],
        ),
    ],
)
def test_echo(asked: Asked, choice: Any, found: list[float]) -> None:
    """The prompt's log-probs come first; with max_tokens 0 they are alone, and nothing is asked."""
    answer = one(body({**choice, "text": "echo"}), asked)
    assert answer.log_probs.tolist() == found
    assert len(answer.response_ids) == len(found)


def test_log_probs_of_a_prompt_without_echo_are_too_many() -> None:
    answer = body({"token_ids": [7], "logprobs": completion(None, -1.0, -0.25)})
    assert refusal(answer).cause == "log_probs"
    assert refusal(answer.replace(b"[7]", b"[7, 8]"), Asked(echo=True)).cause == "log_probs"


# Streams


def collect(events: list[dict[str, Any]], asked: Asked | None = None) -> list[Choice]:
    collector = AnswerCollector(vllm, asked)
    for each in events:
        collector.add(json.dumps(each).encode())
    assert collector.complete
    return collector.choices()


def stream_refusal(events: list[dict[str, Any]], asked: Asked | None = None) -> BadAnswerError:
    with pytest.raises(BadAnswerError) as caught:
        collect(events, asked)
    return caught.value


END = {"finish_reason": "stop"}


@pytest.mark.parametrize(
    ("events", "cause", "words"),
    [
        ([role(), text("a"), text("b"), token(13, **END)], "token_ids", "choice 0 0 ids"),
        ([role(), token(11), text("b"), token(13, **END)], "token_ids", "choice 0 1 before"),
        ([role(), token(11), text("b", token_ids=[]), token(13, **END)], "token_ids", "text"),
        (
            [role(), token(11), event(delta={"tool_calls": [{"index": 0}]}), token(13, **END)],
            "token_ids",
            "text",
        ),
        (
            [role(), token(11), event(delta={"reasoning": "hm"}), token(13, **END)],
            "token_ids",
            "text",
        ),
        ([role(), token(11), token(13, **END), usage(3)], "usage", "3 2"),
        ([role(), token(11), usage(1), token(13, **END)], "usage", "1 come after"),
        ([role(), token(11), usage(-1), token(13, **END)], "usage", "-1 1 came"),
        ([role(), event(logprobs=chat(-1)), token(13, **END)], "log_probs", "without 0 ids"),
        ([role(), token(11), event(logprobs=chat(-1)), token(3, **END)], "log_probs", "after 1"),
        ([role(), {**token(11, **END), "prompt_token_ids": [1, 3]}], "token_ids", "two 2"),
        ([role(), text("a", token_ids=[], **END)], "token_ids", "choice 0 0 ids"),
        ([role(), event(delta="a")], "token_ids", "choice 0 text"),
        ([{"choices": [*token(1)["choices"], *token(2)["choices"]]}], "choices", "0 twice"),
        ([role(), [token(11)], token(3, **END)], "unreadable", "read"),
        ([role(), None], "unreadable", "read"),
        ([role(), token(11), {"choices": "x"}], "unreadable", "choices"),
        ([role(), token(11, **END), token(13)], "after_finish", "1 token ids 'stop'"),
        ([role(), token(11, **END), event(finish_reason="length")], "after_finish", "'length'"),
        ([role(), token(1, 2), {**token(3), "usage": {"completion_tokens": 2}}], "usage", "2 3"),
        ([role(), token(1), event(token_ids=[2], logprobs=chat(-1, -1))], "log_probs", "2 1 after"),
        (
            [role(), token(1), event(token_ids=[2], logprobs={"content": [{"logprob": "x"}]})],
            "log_probs",
            "token 1 'x'",
        ),
    ],
)
def test_what_is_refused_in_a_stream(events: Any, cause: str, words: str) -> None:
    error = stream_refusal(events)
    assert error.cause == cause
    for word in words.split():
        assert word in str(error)


def test_what_a_stream_may_say() -> None:
    """A role, ids without text, text that ends an answer without new ids, a repeated reason."""
    (choice,) = collect(
        [
            role(),
            token(1, 2),
            event(token_ids=[], delta={}),
            token(3, text="abc"),
            event(delta={"content": "d"}, token_ids=[], finish_reason="abort"),
            event(finish_reason="abort"),
            usage(3),
        ]
    )
    assert choice.response_ids.tolist() == [1, 2, 3]
    assert choice.log_probs.tolist() == [-0.5] * 3
    assert choice.finish_reason == "abort"


def test_usage_of_every_event() -> None:
    """vLLM's continuous_usage_stats counts the event's own choice."""
    events = [{**role(0), "usage": {"completion_tokens": 0}}, role(1)]
    for n in range(1, 4):
        for index in (1, 0):
            done = END if n == 3 else {}
            events.append({**token(n, index=index, **done), "usage": {"completion_tokens": n}})
    assert len(collect([*events, usage(6)], Asked(choices=2))) == 2
    assert stream_refusal([*events[:4], *events[6:]], Asked(choices=2)).cause == "usage"


def test_an_echo_is_text_without_ids() -> None:
    events = [role(), text("the last message"), token(3, **END), usage(1)]
    asked = vllm.asked({}, {"echo": True}, CHAT, 1)
    assert collect(events, asked)[0].response_ids.tolist() == [3]


def test_a_choice_without_log_probs_beside_one_with() -> None:
    events = [role(), role(1), event(0, token_ids=[1], **END), token(2, index=1, **END)]
    first, second = collect(events, Asked(choices=2))
    assert (first.log_probs, first.missing_log_probs) == (None, "absent")
    assert second.log_probs.tolist() == [-0.5]


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Events of a chat's stream as vLLM sends them, and each choice's ids."""
    n = draw(st.integers(1, 3))
    ids = [draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)) for _ in range(n)]
    left = [list(each) for each in ids]
    events = [role(index) for index in range(n)]
    while any(left):
        index = draw(st.sampled_from([i for i, each in enumerate(left) if each]))
        size = draw(st.integers(1, len(left[index])))
        taken, left[index] = left[index][:size], left[index][size:]
        done = {} if left[index] else {"finish_reason": draw(st.sampled_from(["stop", "length"]))}
        words = draw(st.sampled_from(["", "é", "\n", "data: x", "\u2028"]))
        events.append(token(*taken, index=index, text=words, **done))
    return [*events, usage(sum(map(len, ids)))], ids


LINE_ENDS = [b"\n", b"\r\n", b"\r"]


@given(streams(), st.sampled_from(LINE_ENDS), st.booleans(), st.data())
def test_any_split_of_a_stream_gives_the_same_rows(
    stream: Any, line_end: bytes, bom: bool, data: st.DataObject
) -> None:
    events, ids = stream
    raw = b"\xef\xbb\xbf" if bom else b""
    for each in events:
        if data.draw(st.booleans()):
            raw += b": ping" + line_end * 2
        raw += b"event: message" + line_end if data.draw(st.booleans()) else b""
        form = data.draw(st.sampled_from([None, 1]))  # with line breaks: several data lines
        lines = json.dumps(each, indent=form, ensure_ascii=data.draw(st.booleans())).split("\n")
        raw += b"".join(b"data: " + line.encode() + line_end for line in lines) + line_end
    raw += b"data: [DONE]" + line_end * 2 + b"\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    reader, collector = EventReader(), AnswerCollector(vllm, Asked(choices=len(ids)))
    passed, n_done = b"", 0
    for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        for each in reader.feed(raw[begin:end]):
            passed += each.raw
            if each.data == b"[DONE]":
                n_done += 1
            elif each.data is not None:
                collector.add(each.data)
    assert passed + reader.rest == raw
    assert n_done == 1
    found = collector.choices()
    assert [each.response_ids.tolist() for each in found] == ids
    assert [len(each.log_probs) for each in found] == [len(each) for each in ids]
    assert all(each.prompt_ids.tolist() == [1, 2] for each in found)


@given(streams(), st.data())
def test_an_answer_that_lost_an_event_with_ids_is_refused(stream: Any, data: st.DataObject) -> None:
    events, ids = stream
    with_ids = [
        i for i, each in enumerate(events) if each["choices"] and "token_ids" in each["choices"][0]
    ]
    lost = data.draw(st.sampled_from(with_ids))
    stream_refusal(events[:lost] + events[lost + 1 :], Asked(choices=len(ids)))


@given(st.data())
def test_an_id_that_is_lost_within_an_event_is_refused(data: st.DataObject) -> None:
    events, ids = data.draw(streams())
    places = [
        i for i, each in enumerate(events) if each["choices"] and "token_ids" in each["choices"][0]
    ]
    broken = events[data.draw(st.sampled_from(places))]["choices"][0]
    broken["token_ids"] = broken["token_ids"][1:]
    if data.draw(st.booleans()):
        broken["logprobs"]["content"] = broken["logprobs"]["content"][1:]
    assert stream_refusal(events, Asked(choices=len(ids))).cause in (
        "log_probs",
        "usage",
        "token_ids",
    )


def test_streams_are_asked_for_their_usage() -> None:
    asked = {"stream_options": {"include_usage": True, "continuous_usage_stats": False}}
    assert vllm.usage_options({"stream": True}) == asked
    assert vllm.usage_options({"stream": True, "stream_options": None}) == asked
    assert vllm.usage_options({"stream": True, "stream_options": {"include_usage": False}}) == asked
    more = {"include_usage": False, "continuous_usage_stats": True}
    assert vllm.usage_options({"stream": True, "stream_options": more}) == asked
    assert vllm.usage_options({"stream": True, "stream_options": {"include_usage": True}}) == {}
    assert (
        vllm.usage_options({"stream": True, "stream_options": "x"}) == {}
    )  # the server refuses it
    assert vllm.usage_options({}) == vllm.usage_options({"stream": False}) == {}


def test_large_log_prob_arrays_keep_their_type() -> None:
    choice = one(body({"token_ids": [7] * 1000, "logprobs": chat(*[-0.1] * 1000)}))
    assert choice.log_probs.dtype == np.float32
    assert choice.log_probs.flags["C_CONTIGUOUS"]
