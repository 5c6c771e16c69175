"""The quickstart's task: find a hidden number from 1 to 3 with two guesses.

After each guess a tool says whether the number is higher or lower. Someone who guesses any digit
finds it in a fifth of the games, someone who begins in the middle and heeds the tool always does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]
Player = Callable[[range, random.Random], int]

LOWEST, HIGHEST = 1, 3
MAX_GUESSES = 2
CORRECT, HIGHER, LOWER = "correct", "higher", "lower"

TRAIN_THINGS = ("apples", "rivers", "stones", "clouds", "tigers", "lemons", "trains", "pianos")
VAL_THINGS = ("candles", "islands")

INSTRUCTION = "Find the number with the tool, then say that it is found."
FOUND = "It is found."
# In the order in which vLLM writes it into the prompt; without a description it writes null there.
GUESS_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess the number.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}},
    },
}


def samples(things: tuple[str, ...]) -> list[dict[str, Any]]:
    """One sample per thing and hidden number, the numbers in turn."""
    return [
        {"things": thing, "hidden": hidden, "data_source": "hidden_number"}
        for thing in things
        for hidden in range(LOWEST, HIGHEST + 1)
    ]


def opening(things: str) -> list[Message]:
    """The messages that a game begins with."""
    question = f"How many {things} are there, from {LOWEST} to {HIGHEST}?"
    return [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": question},
    ]


def judge(guess: int, hidden: int) -> str:
    """What the tool says."""
    if guess == hidden:
        return CORRECT
    return HIGHER if guess < hidden else LOWER


def careless(_left: range, rng: random.Random) -> int:
    """A player who knows how to call the tool, and heeds nothing it says."""
    return rng.randrange(10)


def careful(left: range, _rng: random.Random) -> int:
    """A player who takes the middle of the numbers that are left."""
    return left[len(left) // 2]


def played(things: str, hidden: int, player: Player, rng: random.Random) -> list[Message]:
    """The messages of a whole game."""
    messages = opening(things)
    left = range(LOWEST, HIGHEST + 1)
    for _ in range(MAX_GUESSES):
        guess = player(left, rng)
        verdict = judge(guess, hidden)
        if verdict == HIGHER:
            left = range(max(left.start, guess + 1), left.stop)
        elif verdict == LOWER:
            left = range(left.start, min(left.stop, guess))
        messages.append(
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "type": "function",
                        "function": {"name": "guess", "arguments": {"number": guess}},
                    }
                ],
            }
        )
        messages.append({"role": "tool", "content": verdict})
        if verdict == CORRECT:
            return [*messages, {"role": "assistant", "content": FOUND}]
    return messages
