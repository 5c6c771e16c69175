"""The quickstart's game, the agent that plays it, and the tiny model's tokenizer."""

from __future__ import annotations

import asyncio
import json
import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("agentlightning", reason="needs the extra [cpu]")
pytest.importorskip("transformers", reason="needs the extra [cpu]")

from agl_fast.quickstart import number_game as game
from agl_fast.quickstart.tiny_model import TURN_END, labelled, make_tokenizer


def play(things: str, hidden: int, client: Any) -> float:
    # Only here: it imports agentlightning, which sets up logging when it is imported.
    from agl_fast.quickstart.agent import play as play_one

    return asyncio.run(play_one(things, hidden, client, "a model"))


class Message(SimpleNamespace):
    def model_dump(self, **_: Any) -> dict[str, Any]:
        return {"role": "assistant", "tool_calls": [{"id": self.tool_calls[0].id}]}


def calling(arguments: str, times: int = 1) -> Message:
    function = SimpleNamespace(name="guess", arguments=arguments)
    return Message(content=None, tool_calls=[SimpleNamespace(id="c", function=function)] * times)


def guessing(number: int) -> Message:
    return calling(json.dumps({"number": number}))


def saying(content: str) -> Message:
    return Message(content=content, tool_calls=None)


class ScriptedClient:
    """Answers with the given messages, in order; keeps what it was asked."""

    def __init__(self, *answers: Message) -> None:
        self.answers = list(answers)
        self.asked: list[list[Any]] = []
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.create))

    async def create(self, *, model: str, messages: list[Any], tools: list[Any]) -> Any:
        assert (model, tools) == ("a model", [game.GUESS_TOOL])
        self.asked.append(list(messages))
        return SimpleNamespace(choices=[SimpleNamespace(message=self.answers.pop(0))])


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        ([guessing(3), saying("It is found.")], 1.0),
        ([guessing(2), guessing(3), saying("")], 1.0),
        ([guessing(3), guessing(3)], 1.0),
        ([guessing(2), guessing(1)], 0.0),
        ([saying("It is 3.")], 0.0),
        ([guessing(2), saying("It is 3.")], 0.0),
        ([calling("{")], 0.0),
        ([calling("3")], 0.0),
        ([calling('{"number": "3"}')], 0.0),
        ([calling('{"number": 3}', times=2)], 0.0),
    ],
)
def test_reward_is_for_finding_three(answers, reward):
    client = ScriptedClient(*answers)
    assert play("apples", 3, client) == reward
    assert not client.answers, "there was a further answer"


def test_agent_reads_what_the_tool_says():
    client = ScriptedClient(guessing(2), guessing(1), saying("It is found."))
    play("apples", 1, client)
    assert [messages[-1]["content"] for messages in client.asked[1:]] == ["lower", "correct"]
    assert client.asked[2][: len(client.asked[1])] == client.asked[1]


def test_middle_first_and_heeding_the_tool_always_wins():
    for hidden in range(game.LOWEST, game.HIGHEST + 1):
        messages = game.played("apples", hidden, game.careful, random.Random(0))
        assert messages[-1] == {"role": "assistant", "content": game.FOUND}


def test_careless_player_finds_less_than_three_in_ten():
    rng = random.Random(0)
    games = [game.played("apples", 1 + n % 3, game.careless, rng) for n in range(3000)]
    found = sum(messages[-1]["role"] == "assistant" for messages in games)
    assert 0.15 < found / len(games) < 0.3


def test_validation_asks_about_other_things():
    train, val = game.samples(game.TRAIN_THINGS), game.samples(game.VAL_THINGS)
    assert not {each["things"] for each in train} & {each["things"] for each in val}
    assert {each["hidden"] for each in val} == {1, 2, 3}


@pytest.fixture(scope="module")
def tokenizer():
    rng = random.Random(0)
    messages = game.played("apples", 3, game.careless, rng)
    return make_tokenizer([json.dumps(game.GUESS_TOOL), *map(str, messages)] * 2)


def rendered(tokenizer: Any, messages: list[Any], **keywords: Any) -> list[int]:
    return tokenizer.apply_chat_template(
        messages, tools=[game.GUESS_TOOL], return_dict=False, **keywords
    )


def test_later_prompts_extend_earlier_calls(tokenizer):
    messages = game.played("apples", 3, lambda *_: 3, random.Random(0))
    opening = rendered(tokenizer, messages[:2], add_generation_prompt=True)
    sampled = tokenizer.encode(
        f'<tool_call>\n{{"name": "guess", "arguments": {{"number": 3}}}}\n</tool_call>{TURN_END}'
    )
    later = rendered(tokenizer, messages[:4], add_generation_prompt=True)
    assert later[: len(opening) + len(sampled)] == opening + sampled


def test_only_what_the_assistant_writes_is_learned_in_the_warm_up(tokenizer):
    messages = game.played("apples", 3, lambda *_: 3, random.Random(0))
    _, labels = labelled(tokenizer, [messages])
    learned = tokenizer.decode([each for each in labels[0].tolist() if each >= 0])
    call = '<tool_call>\n{"name": "guess", "arguments": {"number": 3}}\n</tool_call>'
    assert learned == f"{call}{TURN_END}{game.FOUND}{TURN_END}"


def test_any_text_survives_the_tokenizer(tokenizer):
    text = "naïve 12 — 日本\n\t{}"
    assert tokenizer.decode(tokenizer.encode(text)) == text
