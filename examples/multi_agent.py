"""Two agents, one of them the other's tool: a clerk works out a bill and asks a storekeeper.

Each has a conversation of its own, so a rollout becomes a row for the clerk and one for each
question to the storekeeper. Only the clerk is trained: each call says in a header whose it is, and
a hook reads that.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

from openai import AsyncOpenAI

from examples.lessons import Lesson, Message, a_call, tool
from examples.running import Example, main

if TYPE_CHECKING:
    from agentlightning import LLM

    from agl_fast import Rollout

MAX_CALLS = 5
CLERK = "Ask the storekeeper for prices, then give what everything costs, as a number."
STOREKEEPER = "Give the price of the item, as a number."
ASK_STOREKEEPER = tool("ask_storekeeper", "Asks for the price of one piece.", item="string")
ITEMS = ("pen", "cup", "map", "jar", "box")


async def answer(task: dict[str, Any], llm: LLM) -> float:
    """1.0 if the clerk gives the right sum within `MAX_CALLS` calls, else 0.0."""
    messages = to_clerk(task)
    async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none") as client:
        for _ in range(MAX_CALLS):
            completion = await client.chat.completions.create(
                model=llm.model,
                messages=messages,
                tools=[ASK_STOREKEEPER],
                extra_headers={"X-AGL-Agent": "clerk"},
            )
            message = completion.choices[0].message
            if not message.tool_calls:
                return float((message.content or "").strip() == str(task["sum"]))
            messages.append(
                message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
            )
            for call in message.tool_calls:
                price = await asked(client, llm.model, task, item_in(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": price})
    return 0.0


async def asked(client: AsyncOpenAI, model: str, task: dict[str, Any], item: str) -> str:
    """The storekeeper's answer."""
    completion = await client.chat.completions.create(
        model=model,
        messages=to_storekeeper(task, item),
        extra_headers={"X-AGL-Agent": "storekeeper"},
    )
    return completion.choices[0].message.content or ""


def train_the_clerk(rollout: Rollout) -> Rollout:
    """For `agentlightning.rollout_hook`: what the storekeeper says is context for the clerk."""
    for call in rollout.calls:
        call.trainable = call.agent == "clerk"
    return rollout


def to_clerk(task: dict[str, Any]) -> list[Message]:
    first, second = task["order"]
    return [
        {"role": "system", "content": CLERK},
        {"role": "user", "content": f"What do a {first} and a {second} cost?"},
    ]


def to_storekeeper(task: dict[str, Any], item: str) -> list[Message]:
    prices = ", ".join(f"{name} {price}" for name, price in task["prices"].items())
    return [
        {"role": "system", "content": STOREKEEPER},
        {"role": "user", "content": f"Prices: {prices}. What does a {item} cost?"},
    ]


def item_in(arguments: str) -> str:
    """What a call of the tool asks for; whatever it says if it is not what it should be."""
    try:
        return str(json.loads(arguments)["item"])
    except (ValueError, TypeError, KeyError):
        return arguments


def tasks(n: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [a_task(rng) for _ in range(n)]


def a_task(rng: random.Random) -> dict[str, Any]:
    prices = {item: rng.randint(1, 9) for item in ITEMS}
    order = rng.sample(ITEMS, 2)
    return {
        "order": order,
        "prices": prices,
        "sum": sum(prices[item] for item in order),
        "data_source": "multi_agent",
    }


def billing(rng: random.Random) -> list[Message]:
    """The clerk asks for both prices, and is wrong about the sum half of the time."""
    task = a_task(rng)
    messages = to_clerk(task)
    for item in task["order"]:
        messages.append(a_call("ask_storekeeper", item=item))
        messages.append({"role": "tool", "content": str(task["prices"][item])})
    found = task["sum"] if rng.random() < 0.5 else rng.randint(2, 18)
    return [*messages, {"role": "assistant", "content": str(found)}]


def storekeeping(rng: random.Random) -> list[Message]:
    task = a_task(rng)
    item = rng.choice(ITEMS)
    return [
        *to_storekeeper(task, item),
        {"role": "assistant", "content": str(task["prices"][item])},
    ]


EXAMPLE = Example(
    "multi_agent",
    answer,
    tasks,
    [Lesson(billing, [ASK_STOREKEEPER]), Lesson(storekeeping)],
    {"rollout_hook": "examples.multi_agent:train_the_clerk"},
)

if __name__ == "__main__":
    main(EXAMPLE)
