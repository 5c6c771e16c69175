"""Why a call extended no chain."""

from __future__ import annotations

from typing import Any


def classify_mismatch(
    prompt: list[int],
    context: list[int],
    index: int,
    first_prompt_length: int,
    *,
    tokenizer: Any = None,
) -> str:
    """The kind of a prompt that leaves the closest chain's ``context`` at ``index``.

    ``first_prompt_length`` tokens of the context are that chain's first prompt.
    """
    if index == len(prompt):
        return "shortened"
    if index < first_prompt_length:
        return "new_conversation"
    return "history_rewritten"
