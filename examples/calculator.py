"""An agent with a tool: it answers arithmetic, and may ask a calculator."""

from __future__ import annotations

import ast
import json
import operator
import random
from typing import TYPE_CHECKING, Any

from openai import AsyncOpenAI

from examples.lessons import Lesson, Message, a_call, tool
from examples.running import Example, main

if TYPE_CHECKING:
    from agentlightning import LLM

MAX_CALLS = 4
INSTRUCTION = "Use the calculator, then give the result as a number."
CALCULATE = tool("calculate", "Works out an expression.", expression="string")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
OPERATOR_OF_NODE: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.USub: operator.neg,
}


async def answer(task: dict[str, Any], llm: LLM) -> float:
    """1.0 for the right number within `MAX_CALLS` calls of the model, else 0.0."""
    messages = opening(task)
    async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none") as client:
        for _ in range(MAX_CALLS):
            completion = await client.chat.completions.create(
                model=llm.model, messages=messages, tools=[CALCULATE]
            )
            message = completion.choices[0].message
            if not message.tool_calls:
                return float((message.content or "").strip() == str(task["result"]))
            messages.append(
                message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
            )
            for call in message.tool_calls:
                result = calculated(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


def opening(task: dict[str, Any]) -> list[Message]:
    return [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": f"What is {task['expression']}?"},
    ]


def calculated(arguments: str) -> str:
    """What the tool answers to a call: a number, or what is wrong."""
    try:
        return str(value_of(ast.parse(json.loads(arguments)["expression"], mode="eval").body))
    except (ValueError, TypeError, KeyError, SyntaxError, RecursionError) as error:
        return f"error: {error}"


def value_of(node: ast.AST) -> int:
    """
    Raises:
        ValueError: it is more than +, -, * and integers, or the result is huge.
    """
    match node:
        case ast.Constant(value=int(value)):
            found = value
        case ast.BinOp(left, kind, right) if type(kind) in OPERATOR_OF_NODE:
            found = OPERATOR_OF_NODE[type(kind)](value_of(left), value_of(right))
        case ast.UnaryOp(kind, operand) if type(kind) in OPERATOR_OF_NODE:
            found = OPERATOR_OF_NODE[type(kind)](value_of(operand))
        case _:
            raise ValueError("expected +, -, * and integers")
    if abs(found) > 10**12:
        raise ValueError("too large")
    return int(found)


def tasks(n: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [a_task(rng) for _ in range(n)]


def a_task(rng: random.Random) -> dict[str, Any]:
    sign = rng.choice(list(OPERATORS))
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    return {
        "expression": f"{a} {sign} {b}",
        "result": OPERATORS[sign](a, b),
        "data_source": "calculator",
    }


def a_conversation(rng: random.Random) -> list[Message]:
    """Somebody asks the calculator, and half of the time gives another number than it says."""
    task = a_task(rng)
    result = task["result"] if rng.random() < 0.5 else rng.randint(2, 99)
    return [
        *opening(task),
        a_call("calculate", expression=task["expression"]),
        {"role": "tool", "content": str(task["result"])},
        {"role": "assistant", "content": str(result)},
    ]


EXAMPLE = Example("calculator", answer, tasks, [Lesson(a_conversation, [CALCULATE])])

if __name__ == "__main__":
    main(EXAMPLE)
