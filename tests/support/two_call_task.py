"""A task of two calls in one conversation, with a reward that a random model can climb.

Both calls ask for digits, the second one in the conversation that the first one began. The reward
is the share of digits in each answer, averaged: every sampled token counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Message = dict[str, str]

SUBJECTS = ("apple", "river", "stone", "cloud", "tiger", "piano", "lemon", "train")
DIGITS = frozenset("0123456789")


@dataclass(frozen=True)
class TwoCallTask:
    """A conversation about `subject`: what the user says before each call."""

    subject: str

    def questions(self) -> list[Message]:
        contents = (f"count {self.subject}s", "count on")
        return [{"role": "user", "content": content} for content in contents]


def all_tasks() -> list[TwoCallTask]:
    return [TwoCallTask(subject) for subject in SUBJECTS]


def corpus() -> list[str]:
    """What is said in the task, for training a tokenizer."""
    return [
        f"{message['role']}\n{message['content']}"
        for task in all_tasks()
        for message in task.questions()
    ]


def reward(answers: Sequence[str]) -> float:
    """Share of digits in an answer, averaged over the answers; an empty answer has none."""
    shares = [sum(char in DIGITS for char in answer) / max(1, len(answer)) for answer in answers]
    return sum(shares) / len(shares)
