"""The agent: plays the number game with any model that calls tools."""

from __future__ import annotations

import json
from typing import Any

import agentlightning as agl
from openai import AsyncOpenAI

from agl_fast.quickstart.number_game import CORRECT, GUESS_TOOL, MAX_GUESSES, judge, opening


async def play(things: str, hidden: int, client: Any, model: str) -> float:
    """One game: at most `MAX_GUESSES` calls of the tool, then the closing words.

    Args:
        client: an `openai.AsyncOpenAI`.
        model: its name there.

    Returns:
        1.0 if the number was found, else 0.0.
    """
    messages: list[Any] = opening(things)
    verdict, guesses = "", 0
    while True:
        completion = await client.chat.completions.create(
            model=model, messages=messages, tools=[GUESS_TOOL]
        )
        message = completion.choices[0].message
        guess = guess_in(message)
        if guess is None or verdict == CORRECT:
            return float(verdict == CORRECT)
        guesses += 1
        verdict = judge(guess, hidden)
        if verdict != CORRECT and guesses == MAX_GUESSES:
            return 0.0
        call = message.tool_calls[0]
        messages.append(
            message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
        )
        messages.append({"role": "tool", "tool_call_id": call.id, "content": verdict})


def guess_in(message: Any) -> int | None:
    """The number of the message's one tool call; None: it calls nothing, or calls it wrongly."""
    if not message.tool_calls or len(message.tool_calls) != 1:
        return None
    try:
        arguments = json.loads(message.tool_calls[0].function.arguments)
    except json.JSONDecodeError:
        return None
    number = arguments.get("number") if isinstance(arguments, dict) else None
    return number if isinstance(number, int) else None


async def _find_the_number(task: dict[str, Any], llm: agl.LLM) -> float:
    async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none") as client:
        return await play(task["things"], task["hidden"], client, llm.model)


find_the_number = agl.rollout(_find_the_number)
