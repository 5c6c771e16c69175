"""The agent: searches with any model that calls tools."""

from __future__ import annotations

import json
from typing import Any

import agentlightning as agl
from openai import AsyncOpenAI

from agl_fast.quickstart.boxes import MAX_CALLS, OPEN_TOOL, note_in, opening, without_reasoning


async def search(task: dict[str, Any], client: Any, model: str) -> float:
    """Let the model open boxes until it gives an answer, at most `MAX_CALLS` calls.

    Args:
        task: of `boxes.samples`.
        client: an `openai.AsyncOpenAI`.
        model: its name there.

    Returns:
        1.0 for the hidden number, else 0.0.
    """
    messages: list[Any] = opening(task)
    for _ in range(MAX_CALLS):
        completion = await client.chat.completions.create(
            model=model, messages=messages, tools=[OPEN_TOOL]
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            return float(without_reasoning(message.content or "") == str(task["number"]))
        messages.append(
            message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
        )
        for call in message.tool_calls:
            content = note_in(task, box_in(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return 0.0


def box_in(arguments: str) -> object:
    """The box that a call of the tool names; None: it names none."""
    try:
        return json.loads(arguments)["box"]
    except (ValueError, TypeError, KeyError):
        return None


async def _find_the_number(task: dict[str, Any], llm: agl.LLM) -> float:
    async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none") as client:
        return await search(task, client, llm.model)


find_the_number = agl.rollout(_find_the_number)
