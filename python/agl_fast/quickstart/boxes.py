"""The quickstart's task: find the number that is hidden in a row of boxes.

A box holds a note that names the next box, the last one holds the number. Whoever opens box after
box is always right; whoever guesses on the way gets nothing.
"""

from __future__ import annotations

import random
from typing import Any

Message = dict[str, Any]

LOWEST, HIGHEST = 10, 99
# How many boxes a search may take: one call of the model each, and one for the answer.
CHAINS = (2, 3)
MAX_CALLS = 4

THINK, THINK_END = "<think>", "</think>"

INSTRUCTION = "Open boxes until you find the number, then give it."
# In the order in which vLLM writes it into the prompt; without a description it writes null there.
OPEN_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "open",
        "description": "Reads the note in a box.",
        "parameters": {
            "type": "object",
            "properties": {"box": {"type": "integer"}},
            "required": ["box"],
        },
    },
}


def samples(n: int, *, seed: int) -> list[dict[str, Any]]:
    """`n` searches, short and long ones in turn.

    Returns:
        Of each its boxes in order, the hidden number, and its length as data_source.
    """
    rng = random.Random(seed)
    return [search(rng, CHAINS[i % len(CHAINS)]) for i in range(n)]


def search(rng: random.Random, n_boxes: int) -> dict[str, Any]:
    *boxes, number = rng.sample(range(LOWEST, HIGHEST + 1), n_boxes + 1)
    return {"boxes": boxes, "number": number, "data_source": f"{n_boxes}_boxes"}


def opening(task: dict[str, Any]) -> list[Message]:
    """The messages that a search begins with."""
    return [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": f"Start at box {task['boxes'][0]}"},
    ]


def note_in(task: dict[str, Any], box: object) -> str:
    """What the tool answers."""
    boxes = task["boxes"]
    if box not in boxes:
        return "The box is empty"
    place = boxes.index(box)
    if place + 1 < len(boxes):
        return f"Look in box {boxes[place + 1]}"
    return f"The number is {task['number']}"


def a_call(box: int, content: str | None = None) -> Message:
    """An answer of the model that opens a box."""
    function = {"name": "open", "arguments": {"box": box}}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"type": "function", "function": function}],
    }


def thought(text: str) -> str:
    """Reasoning, as models write it before an answer."""
    return f"{THINK}\n{text}\n{THINK_END}\n"


def without_reasoning(content: str) -> str:
    """What an answer says after its reasoning."""
    return content.rpartition(THINK_END)[2].strip()


def a_conversation(
    rng: random.Random, patience: float, *, reasoning: bool = False
) -> list[Message]:
    """How somebody searches.

    Args:
        patience: the probability of opening the next box; otherwise a guess is given as the
            answer. Everybody opens the first one.
        reasoning: every answer begins with some, which repeats what was read.
    """

    def thinking(text: str) -> str:
        return thought(text) if reasoning else ""

    task = search(rng, rng.choice(CHAINS))
    messages = opening(task)
    for box in task["boxes"]:
        if box != task["boxes"][0] and rng.random() >= patience:
            guess = thinking("I would rather guess") + f"Perhaps {rng.randint(LOWEST, HIGHEST)}"
            return [*messages, {"role": "assistant", "content": guess}]
        messages += [
            a_call(box, thinking(messages[-1]["content"]) or None),
            {"role": "tool", "content": note_in(task, box)},
        ]
    answer = thinking(messages[-1]["content"]) + str(task["number"])
    return [*messages, {"role": "assistant", "content": answer}]
