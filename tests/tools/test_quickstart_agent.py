"""The quickstart's task, the agent that solves it, and the tiny model's tokenizer and warm-up."""

from __future__ import annotations

import asyncio
import json
import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("agentlightning", reason="needs the extra [cpu]")
pytest.importorskip("transformers", reason="needs the extra [cpu]")

from agl_fast.quickstart import boxes
from agl_fast.quickstart.tiny_model import (
    MARKUP,
    REASONING_MARKUP,
    TURN_END,
    labelled,
    make_tokenizer,
    up_to_each_answer,
)

TASK = {"boxes": [12, 34], "number": 56, "data_source": "2_boxes"}


def search(client: Any) -> float:
    # Only here: it imports agentlightning, which sets up logging when it is imported.
    from agl_fast.quickstart.agent import search as search_for

    return asyncio.run(search_for(TASK, client, "a model"))


class Message(SimpleNamespace):
    def model_dump(self, **_: Any) -> dict[str, Any]:
        return {"role": "assistant", "tool_calls": [{"id": call.id} for call in self.tool_calls]}


def calling(*arguments: str) -> Message:
    calls = [
        SimpleNamespace(id=f"c{n}", function=SimpleNamespace(name="open", arguments=each))
        for n, each in enumerate(arguments)
    ]
    return Message(content=None, tool_calls=calls)


def opening(box: object) -> Message:
    return calling(json.dumps({"box": box}))


def saying(content: str) -> Message:
    return Message(content=content, tool_calls=None)


class ScriptedClient:
    """Answers with the given messages, in order; keeps what it was asked."""

    def __init__(self, *answers: Message) -> None:
        self.answers = list(answers)
        self.asked: list[list[Any]] = []
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.create))

    async def create(self, *, model: str, messages: list[Any], tools: list[Any]) -> Any:
        assert (model, tools) == ("a model", [boxes.OPEN_TOOL])
        self.asked.append(list(messages))
        return SimpleNamespace(choices=[SimpleNamespace(message=self.answers.pop(0))])


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        ([opening(12), opening(34), saying("56")], 1.0),
        ([opening(12), opening(34), saying(" 56\n")], 1.0),
        ([opening(12), opening(99), opening(34), saying("56")], 1.0),
        ([calling('{"box": 12}', '{"box": 34}'), saying("56")], 1.0),
        ([saying("56")], 1.0),
        ([opening(12), saying("<think>\nThe number is 56\n</think>\n56")], 1.0),
        ([opening(12), saying("<think>\nThe number is 56")], 0.0),
        ([opening(12), saying("Perhaps 56")], 0.0),
        ([opening(12), saying("34")], 0.0),
        ([calling("{"), saying("34")], 0.0),
        ([opening(12)] * boxes.MAX_CALLS, 0.0),
    ],
)
def test_reward_is_for_the_number(answers, reward):
    client = ScriptedClient(*answers)
    assert search(client) == reward
    assert not client.answers, "there was a further answer"


def test_agent_reads_the_notes():
    wrong = [calling("3"), calling("{}"), opening("12")]
    client = ScriptedClient(opening(12), opening(34), *wrong[:1], saying("56"))
    search(client)
    notes = [messages[-1]["content"] for messages in client.asked[1:]]
    assert notes == ["Look in box 34", "The number is 56", "The box is empty"]
    assert client.asked[2][: len(client.asked[1])] == client.asked[1]
    client = ScriptedClient(*wrong, saying("56"))
    search(client)
    assert [messages[-1]["content"] for messages in client.asked[1:]] == ["The box is empty"] * 3


def test_samples_are_short_and_long_in_turn_and_follow_the_seed():
    samples = boxes.samples(6, seed=3)
    assert [len(each["boxes"]) for each in samples] == [2, 3] * 3
    assert [each["data_source"] for each in samples[:2]] == ["2_boxes", "3_boxes"]
    assert samples == boxes.samples(6, seed=3)
    assert samples != boxes.samples(6, seed=4)
    for each in samples:
        assert len({*each["boxes"], each["number"]}) == len(each["boxes"]) + 1


def patient_share(patience: float) -> float:
    rng = random.Random(0)
    ends = [boxes.a_conversation(rng, patience)[-1]["content"] for _ in range(2000)]
    return sum(end.isdigit() for end in ends) / len(ends)


def test_the_patient_find_the_number_and_the_impatient_guess():
    assert patient_share(1.0) == 1.0
    assert patient_share(0.0) == 0.0
    # Half of the searches go on once, half twice.
    assert patient_share(0.3) == pytest.approx((0.3 + 0.3**2) / 2, abs=0.03)


@pytest.fixture(scope="module")
def conversation():
    return boxes.a_conversation(random.Random(1), 1.0)


@pytest.fixture(scope="module")
def tokenizer(conversation):
    return make_tokenizer([json.dumps(boxes.OPEN_TOOL), *map(str, conversation)] * 2)


def rendered(tokenizer: Any, messages: list[Any], **keywords: Any) -> list[int]:
    return tokenizer.apply_chat_template(
        messages, tools=[boxes.OPEN_TOOL], return_dict=False, **keywords
    )


def written(box: int) -> str:
    return f'<tool_call>\n{{"name": "open", "arguments": {{"box": {box}}}}}\n</tool_call>{TURN_END}'


def test_later_prompts_extend_earlier_calls(tokenizer, conversation):
    box = conversation[2]["tool_calls"][0]["function"]["arguments"]["box"]
    prompt = rendered(tokenizer, conversation[:2], add_generation_prompt=True)
    sampled = tokenizer.encode(written(box))
    later = rendered(tokenizer, conversation[:4], add_generation_prompt=True)
    assert later[: len(prompt) + len(sampled)] == prompt + sampled


def test_prompt_lists_the_tool(tokenizer, conversation):
    text = tokenizer.decode(rendered(tokenizer, conversation[:2]))
    assert json.dumps(boxes.OPEN_TOOL) in text


def test_only_what_the_assistant_writes_is_learned_in_the_warm_up(tokenizer, conversation):
    calls = [
        message["tool_calls"][0]["function"]["arguments"]["box"]
        for message in conversation
        if "tool_calls" in message
    ]
    for tools in (None, [boxes.OPEN_TOOL]):
        _, labels = labelled(tokenizer, [conversation], tools)
        learned = tokenizer.decode([each for each in labels[0].tolist() if each >= 0])
        assert learned == "".join(map(written, calls)) + conversation[-1]["content"] + TURN_END


def test_any_text_survives_the_tokenizer(tokenizer):
    text = "naïve 12 — 日本\n\t{}"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.fixture(scope="module")
def reasoned():
    return boxes.a_conversation(random.Random(1), 1.0, reasoning=True)


@pytest.fixture(scope="module")
def reasoning_tokenizer(reasoned):
    texts = [json.dumps(boxes.OPEN_TOOL), *map(str, reasoned)] * 2
    return make_tokenizer(texts, markup=MARKUP + REASONING_MARKUP)


def test_reasoning_repeats_what_was_read(reasoned):
    answers = [message for message in reasoned if message["role"] == "assistant"]
    for answer in answers:
        read = reasoned[reasoned.index(answer) - 1]["content"]
        assert answer["content"].startswith(f"<think>\n{read}\n</think>\n")
    assert boxes.without_reasoning(answers[-1]["content"]).isdigit()


def test_history_is_read_without_its_reasoning(reasoning_tokenizer, reasoned):
    first = rendered(reasoning_tokenizer, reasoned[:2], add_generation_prompt=True)
    sampled = rendered(reasoning_tokenizer, reasoned[:3])[len(first) :]
    later = rendered(reasoning_tokenizer, reasoned[:4], add_generation_prompt=True)
    assert later[: len(first)] == first
    assert later[: len(first) + len(sampled)] != first + sampled
    assert "<think>" in reasoning_tokenizer.decode(sampled)
    assert "<think>" not in reasoning_tokenizer.decode(later)


def test_every_answer_is_learned_with_its_reasoning(reasoning_tokenizer, reasoned):
    begun = up_to_each_answer(reasoned)
    _, labels = labelled(reasoning_tokenizer, begun, [boxes.OPEN_TOOL])
    learned = [
        reasoning_tokenizer.decode([each for each in row if each >= 0]) for row in labels.tolist()
    ]
    assert len(learned) == sum(message["role"] == "assistant" for message in reasoned)
    for text, conversation in zip(learned, begun, strict=True):
        assert text.startswith(conversation[-1]["content"])
        assert text.endswith(TURN_END)
        assert text.count("<think>") == 1
