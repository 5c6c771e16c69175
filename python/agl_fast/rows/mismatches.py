"""Broken prefixes: kinds, and causes from decoded text."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agl_fast.rows.accounting import Mismatch
from agl_fast.rows.calls import Call, Rollout

Ids = NDArray[np.int64]

# Agent-lightning's names for the kinds of MISMATCH_KINDS.
AGENT_LIGHTNING_NAMES = {
    "history_rewritten": "template",
    "retokenised": "retoken",
    "generation_prompt": "template",
    "shortened": "others",
    "positions_changed": "others",
    "new_conversation": "others",
}

# Each cause in words: "In N of M decoded cases, …". A new conversation has no cause.
CAUSES: Mapping[str, str] = {
    "retokenised": "the history was tokenised again, to other ids for the same text",
    "generation_prompt": (
        "the chat template puts something before an answer (such as an empty think block) that it "
        "leaves out of the history"
    ),
    "reasoning_removed": "the chat template removed the reasoning from earlier answers",
    "white_space": "the chat template or the agent changed white space around an answer",
    "tool_call_completed": (
        "the model left the end of its tool call out, and the server's tool parser completed it"
    ),
    "end_token": "an answer ended with another token than the chat template puts behind it",
    "arguments_rerendered": (
        "the chat template rendered a tool call's arguments anew, in another notation"
    ),
    "tools_not_rendered": "the chat template does not render tool calls",
    "beginning_changed": (
        "the beginning of the conversation changed (a date or another variable text in the system "
        "prompt, other tools)"
    ),
    "observation_changed": "a tool result or user message in the history changed",
    "history_shortened": (
        "the agent removed the end of its history, or sampled the same prompt again"
    ),
    "positions_changed": "the same tokens got other position ids (another size of an image)",
    "unknown": "an earlier answer changed (the agent or the chat template rewrote it)",
}

# Remedies, where one exists.
_CURES: Mapping[str, str] = {
    "retokenised": "an agent that sends token ids instead of text keeps them",
    "generation_prompt": "a template that writes it in both places, or in neither, merges",
    "reasoning_removed": "a template that keeps reasoning in the history merges",
    "white_space": "a template that does not trim, and an agent that does not strip, merge",
    "tool_call_completed": (
        "such a call is malformed: a reward for well-formed calls, or a larger max_tokens, helps"
    ),
    "arguments_rerendered": "a template that renders arguments as the model writes them merges",
    "tools_not_rendered": (
        "the model does not see its own tool calls: use a template that renders them"
    ),
    "beginning_changed": "a system prompt without a variable part merges",
}

_PROBE_TOKENS = 32
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # a character cut between two tokens
# Number of non-space characters that identifies a text within another.
_SAME = 24
# Tokens before an answer that identify it in another conversation.
_BEFORE = 6
_MARGIN = 64
_REASONING = re.compile(
    r"<think(?:ing)?>.*?(?:</think(?:ing)?>|$)|^.*?</think(?:ing)?>|\[THINK\].*?(?:\[/THINK\]|$)|"
    r"<\|channel\|>analysis.*?(?:<\|end\|>(?:<\|start\|>assistant)?|$)",
    re.DOTALL,
)
_TOOL_CALL = re.compile(
    r"<tool_call|<\|tool_call|\[TOOL_CALLS?\]|<function[=_]|<\|python_tag\|>|```tool_code|"
    r"<\|channel\|>commentary|<\uFF5Ctool\u2581call|\{\s*\"name\"\s*:"
)
# What a tool parser appends to an incomplete tool call.
_CALL_END = re.compile(
    r"[\"'}\])]|</|<\|/|<\|tool_call_end|\[/TOOL|```|<\uFF5Ctool\u2581calls?\u2581end"
)


def is_retokenised(tokenizer: Any, context: Sequence[int], prompt: Sequence[int]) -> bool:
    """Whether a prompt continues with a chain's text in other tokens.

    Decodes only from the first difference on, and everything only if the beginnings agree.

    Args:
        tokenizer: object with ``decode(ids, skip_special_tokens=False)``.
        context: the chain's ids from the first difference to the end of its context.
        prompt: the prompt's ids from the first difference on.
    """
    if not context or not prompt:
        return False

    def text(ids: Sequence[int]) -> str:
        decoded = tokenizer.decode(list(ids), skip_special_tokens=False)
        return str(decoded).rstrip(_REPLACEMENT)

    begins, other_begins = text(context[:_PROBE_TOKENS]), text(prompt[:_PROBE_TOKENS])
    if not (begins.startswith(other_begins) or other_begins.startswith(begins)):
        return False
    # The same text takes at most about four times as many tokens.
    return text(prompt[: 4 * len(context) + _PROBE_TOKENS]).startswith(text(context))


def causes_of(
    mismatches: Sequence[Mismatch], rollouts: Sequence[Rollout], tokenizer: Any, most: int
) -> Counter[str]:
    """Count the causes of the first ``most`` mismatches, without new conversations.

    Args:
        tokenizer: with ``decode(ids, skip_special_tokens=False)``.
    """
    of_id = {rollout.rollout_id: rollout for rollout in rollouts}
    found: Counter[str] = Counter()
    for mismatch in mismatches[:most]:
        cause = cause_of(mismatch, of_id[mismatch.rollout_id].calls, tokenizer)
        if cause is not None:
            found[cause] += 1
    return found


def cause_of(mismatch: Mismatch, calls: Sequence[Call], tokenizer: Any) -> str | None:
    """Find the cause, one of ``CAUSES``; None for a new conversation."""
    if mismatch.kind == "shortened":
        return "history_shortened"
    if mismatch.kind in ("retokenised", "positions_changed"):
        return mismatch.kind
    prompt = _ids(calls[mismatch.call].prompt_ids)
    begin, answer = _answer_at(mismatch, calls, prompt)

    def text(ids: Ids) -> str:
        return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    if mismatch.kind == "new_conversation":
        _, context = closest_call(mismatch, calls, prompt)
        said = (
            _packed(text(context[max(0, begin - _BEFORE) : begin])) + _packed(text(answer))[:_SAME]
        )
        repeated = len(answer) > 1 and said in _packed(text(prompt[mismatch.index :]))
        return "beginning_changed" if repeated and mismatch.index else None
    if begin > mismatch.index and mismatch.kind != "generation_prompt":
        return "observation_changed"
    shown = prompt[min(begin, mismatch.index) : begin + 4 * len(answer) + _MARGIN]
    if mismatch.kind == "generation_prompt":
        is_removed = _is_reasoning_removed(text(answer), text(shown))
        return "reasoning_removed" if is_removed else "generation_prompt"
    return _of_texts(text(answer[:-1]), text(answer), text(shown))


def causes_in_words(causes: Mapping[str, int]) -> str:
    """Describe the two most common causes in a paragraph."""
    n = sum(causes.values())
    told = []
    for cause, count in Counter(causes).most_common(2):
        if count:
            cure = f"; {_CURES[cause]}" if cause in _CURES else ""
            told.append(f"in {count:,} {CAUSES[cause]}{cure}")
    return f"Of {n:,} broken prefixes whose text was compared, {', '.join(told)}."


def closest_call(mismatch: Mismatch, calls: Sequence[Call], prompt: Ids) -> tuple[int, Ids]:
    """Find the last call of the closest chain, and its context."""
    has_same_tokens = mismatch.kind == "positions_changed"
    for index in range(mismatch.call - 1, -1, -1):
        context = context_of(calls[index])
        # Other calls may share more, such as a judge's, but are no chain that could be extended.
        shared = common_prefix(context, prompt)
        if shared == (len(context) if has_same_tokens else mismatch.index):
            return index, context
    raise AssertionError("a mismatch has a chain that it was compared with")


def context_of(call: Call) -> Ids:
    """Prompt and response ids of a call, concatenated."""
    return np.concatenate([_ids(call.prompt_ids), _ids(call.response_ids)])


def common_prefix(first: Ids, second: Ids) -> int:
    """Length of the common prefix."""
    n = min(len(first), len(second))
    differs = np.flatnonzero(first[:n] != second[:n])
    return int(differs[0]) if len(differs) else n


def _answer_at(mismatch: Mismatch, calls: Sequence[Call], prompt: Ids) -> tuple[int, Ids]:
    """Find the earliest answer that ends after the first difference: its start and its ids."""
    closest, context = closest_call(mismatch, calls, prompt)
    for call in calls[:closest]:
        n = len(call.prompt_ids) + len(call.response_ids)
        if mismatch.index < n <= len(context) and np.array_equal(context_of(call), context[:n]):
            return len(call.prompt_ids), _ids(call.response_ids)
    return len(calls[closest].prompt_ids), _ids(calls[closest].response_ids)


def _of_texts(unended: str, answer: str, found: str) -> str:
    """Find the cause from an answer (with and without its last token) and its replacement."""
    said, shown = _packed(answer), _packed(found)
    if _is_reasoning_removed(answer, found):
        return "reasoning_removed"
    end = answer.removeprefix(unended)
    message = found.partition(end)[0] if end.strip() else found
    calls_tool = _TOOL_CALL.search(answer) is not None
    if calls_tool and _differs_inside_object(answer, found):
        return "arguments_rerendered"
    if shown.startswith(said):
        return "white_space"
    if shown.startswith(_packed(unended)):
        rest = shown.removeprefix(_packed(unended))
        return "tool_call_completed" if calls_tool and _CALL_END.match(rest) else "end_token"
    if calls_tool and not _TOOL_CALL.search(message):
        return "tools_not_rendered"
    if calls_tool and _words(unended) == _words(message):
        return "arguments_rerendered"
    return "unknown"


def _is_reasoning_removed(answer: str, found: str) -> bool:
    without = _packed(_REASONING.sub("", answer, count=1))
    said, shown = _packed(answer), _packed(found)
    if len(without) == len(said) or shown.startswith(said[:_SAME]):
        return False
    return shown.startswith(without[:_SAME])


def _differs_inside_object(answer: str, found: str) -> bool:
    """Whether the first difference lies in a JSON object that is equal in both texts."""
    pairs = zip(answer, found, strict=False)
    at = next((i for i, (one, other) in enumerate(pairs) if one != other), len(answer))
    begin = answer.find("{")
    while 0 <= begin <= at:
        object_, end = _object(answer, begin)
        if end > at:
            return object_ is not None and object_ == _object(found, begin)[0]
        begin = answer.find("{", max(end, begin + 1))
    return False


def _object(text: str, begin: int) -> tuple[Any, int]:
    """Parse the JSON object at ``begin``: the object, or None, and its end."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, begin)
    except ValueError:
        return None, begin
    return value, end


def _words(text: str) -> list[str]:
    return sorted(re.findall(r"\w+", text))


def _packed(text: str) -> str:
    """The text without white space."""
    return "".join(text.split())


def _ids(given: Any) -> Ids:
    return np.asarray(given, dtype=np.int64)
