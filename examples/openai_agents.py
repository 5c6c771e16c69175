"""An agent of the OpenAI Agents SDK as it is: only its client points to the model in training.

The SDK speaks to the chat completions endpoint (`OpenAIChatCompletionsModel`).
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from agents import (
    Agent,
    AgentsException,
    OpenAIChatCompletionsModel,
    RunConfig,
    RunContextWrapper,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI

from examples.lessons import Lesson, Message, a_call
from examples.running import Example, main

if TYPE_CHECKING:
    from agentlightning import LLM

MAX_TURNS = 4
PLACES = ("Aston", "Borley", "Corby", "Denby", "Eaton")


@function_tool
def size_of(run: RunContextWrapper[dict[str, Any]], place: str) -> str:
    """How many people live in a place."""
    return str(run.context["sizes"].get(place, "unknown"))


GEOGRAPHER: Agent[dict[str, Any]] = Agent(
    name="geographer",
    instructions="Look up how large the places are, then name the larger one.",
    tools=[size_of],
)


async def answer(task: dict[str, Any], llm: LLM) -> float:
    """1.0 for the larger place, else 0.0, also if the model breaks the SDK's rules."""
    async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none") as client:
        model = OpenAIChatCompletionsModel(model=llm.model, openai_client=client)
        try:
            result = await Runner.run(
                GEOGRAPHER,
                question(task),
                context=task,
                max_turns=MAX_TURNS,
                # Its traces would go to OpenAI.
                run_config=RunConfig(model=model, tracing_disabled=True),
            )
        except AgentsException:
            return 0.0
    return float(str(result.final_output).strip() == larger(task))


def question(task: dict[str, Any]) -> str:
    return f"Which is larger, {' or '.join(task['sizes'])}?"


def larger(task: dict[str, Any]) -> str:
    sizes: dict[str, int] = task["sizes"]
    return max(sizes, key=lambda place: sizes[place])


def tasks(n: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [a_task(rng) for _ in range(n)]


def a_task(rng: random.Random) -> dict[str, Any]:
    places = rng.sample(PLACES, 2)
    sizes = dict(zip(places, rng.sample(range(1, 10), 2), strict=True))
    return {"sizes": sizes, "data_source": "openai_agents"}


def a_conversation(rng: random.Random) -> list[Message]:
    """Somebody looks up both places, and then names either."""
    task = a_task(rng)
    messages: list[Message] = [
        {"role": "system", "content": GEOGRAPHER.instructions},
        {"role": "user", "content": question(task)},
    ]
    for place, size in task["sizes"].items():
        messages.append(a_call("size_of", place=place))
        messages.append({"role": "tool", "content": str(size)})
    return [*messages, {"role": "assistant", "content": rng.choice(list(task["sizes"]))}]


TOOL = {
    "type": "function",
    "function": {
        "name": size_of.name,
        "description": size_of.description,
        "parameters": size_of.params_json_schema,
        "strict": size_of.strict_json_schema,
    },
}
EXAMPLE = Example("openai_agents", answer, tasks, [Lesson(a_conversation, [TOOL])])

if __name__ == "__main__":
    main(EXAMPLE)
