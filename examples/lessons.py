"""What the tiny model is taught before an example trains it.

A few seconds of supervised learning: it writes as an assistant of the example does, and is often
wrong, so that agents call tools and rewards differ. For a model of yours none of this is needed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Message = dict[str, Any]

N_HEARD, CONVERSATIONS_PER_STEP = 100, 16
RATE = 4e-3


@dataclass(frozen=True)
class Lesson:
    """How somebody speaks in one of an example's roles.

    Attributes:
        conversation: makes one, from the system's message to the assistant's last.
        tools: which the assistant may call, in OpenAI's form.
    """

    conversation: Callable[[random.Random], list[Message]]
    tools: Sequence[dict[str, Any]] = ()


def tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """A tool in OpenAI's form, with the JSON types of its parameters, all of them required."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(parameters),
            },
        },
    }


def a_call(name: str, **arguments: Any) -> Message:
    """An answer of the assistant that calls a tool, as chat templates take it."""
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": function}],
    }


def make_model(folder: Path, lessons: Sequence[Lesson], *, max_length: int, seed: int) -> None:
    """Write a tiny float32 Qwen2 that took the lessons, and its tokenizer, to `folder`."""
    import torch

    from agl_fast.quickstart.tiny_model import labelled, learn, make_tokenizer, new_model

    rng = random.Random(seed)
    torch.manual_seed(seed)
    heard = [plain_text(lesson, rng) for lesson in lessons for _ in range(N_HEARD)]
    tokenizer = make_tokenizer(heard, max_length=max_length)
    model = new_model(tokenizer, max_length=max_length)
    steps = 120 + 40 * len(lessons)

    def batch(step: int) -> Any:
        lesson = lessons[step % len(lessons)]
        some = [lesson.conversation(rng) for _ in range(CONVERSATIONS_PER_STEP)]
        return labelled(tokenizer, some, list(lesson.tools) or None)

    learn(model, map(batch, range(steps)), steps=steps, rate=RATE)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def plain_text(lesson: Lesson, rng: random.Random) -> str:
    """What a tokenizer should know, about as often as it is said."""
    said = [json.dumps(each) for each in lesson.tools]
    for message in lesson.conversation(rng):
        said.append(f"{message['role']}\n{message['content'] or ''}")
        said += [json.dumps(call["function"]) for call in message.get("tool_calls", ())]
    return "\n".join(said)
