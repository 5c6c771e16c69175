"""Why a call extended no chain."""

from __future__ import annotations

from typing import Any

# What a chat template puts before an answer is shorter; so many tokens identify an answer.
_GENERATION_PROMPT = 32
_OTHER_PROMPT = 8  # one that takes the place of another, and so is the other
_ANSWER_PROBE = 4

_CUT_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # what the bytes of half a character decode to


def classify_mismatch(
    prompt: list[int],
    context: list[int],
    index: int,
    first_prompt_length: int,
    *,
    answer: tuple[int, list[int]],
    tokenizer: Any = None,
) -> str:
    """The kind of a prompt that leaves the closest chain's ``context`` at ``index``.

    ``first_prompt_length`` tokens of the context are that chain's first prompt. ``answer`` is the
    next answer behind ``index``: where it begins in the context, and its tokens.
    """
    if index == len(prompt):
        return "shortened"
    if tokenizer is not None and _is_retokenised(prompt[index:], context[index:], tokenizer):
        return "retokenised"
    begin, answer_tokens = answer
    if 0 < index < begin and _is_generation_prompt(
        prompt[index:], context[index:begin], answer_tokens, is_first=index < first_prompt_length
    ):
        return "generation_prompt"
    if index < first_prompt_length:
        return "new_conversation"
    return "history_rewritten"


def _is_generation_prompt(
    prompt: list[int], expected: list[int], answer: list[int], *, is_first: bool
) -> bool:
    """Whether only what the chat template put before the answer differs.

    ``prompt`` begins at the first difference; ``expected`` stood there in the context, before the
    answer; ``is_first`` where that is the end of the chain's first prompt.
    """
    if len(expected) > _GENERATION_PROMPT:
        return False
    begins = answer[:_ANSWER_PROBE]
    tails = [answer[i : i + _ANSWER_PROBE] for i in range(1, len(answer) - 1)]
    if any(prompt[: len(part)] == part for part in [begins, *tails]):
        return True
    return (
        is_first
        and len(expected) <= _OTHER_PROMPT
        and any(
            prompt[i : i + len(begins)] == begins
            for i in range(1, min(_OTHER_PROMPT, len(prompt) - 1) + 1)
        )
    )


def _is_retokenised(prompt: list[int], context: list[int], tokenizer: Any) -> bool:
    """Whether the prompt goes on with the text of the context, in other tokens."""
    text = tokenizer.decode(context, skip_special_tokens=False).rstrip(_CUT_CHARACTER)
    return bool(tokenizer.decode(prompt, skip_special_tokens=False).startswith(text))
