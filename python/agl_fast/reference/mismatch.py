"""Why a call extended no chain."""

from __future__ import annotations

from typing import Any

_CUT_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # what the bytes of half a character decode to


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
    if tokenizer is not None and _is_retokenised(prompt[index:], context[index:], tokenizer):
        return "retokenised"
    if index < first_prompt_length:
        return "new_conversation"
    return "history_rewritten"


def _is_retokenised(prompt: list[int], context: list[int], tokenizer: Any) -> bool:
    """Whether the prompt goes on with the text of the context, in other tokens."""
    text = tokenizer.decode(context, skip_special_tokens=False).rstrip(_CUT_CHARACTER)
    return bool(tokenizer.decode(prompt, skip_special_tokens=False).startswith(text))
