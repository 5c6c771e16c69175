"""Chains: one per call, or merged where a prompt extends a whole earlier context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agl_fast.reference.calls import Turn
from agl_fast.rows.accounting import Mismatch

CONTEXT = -1

# Limits on the length of a generation prompt, and tokens that identify an answer.
_GENERATION_PROMPT = 32
_OTHER_PROMPT = 8  # if it replaces another one, and the length of that
_ANSWER_PROBE = 4

_CUT_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # decoded from an incomplete character


@dataclass
class Chain:
    """A growing chain; ``sampled_by`` and ``log_probs`` are parallel to ``response``.

    ``sampled_by`` is the index of the call that sampled the token, or ``CONTEXT`` for tokens of
    tools and users. ``positions`` are those of prompt and response as the last call has them.
    """

    first_call: int
    prompt: list[int]
    response: list[int]
    sampled_by: list[int]
    log_probs: list[float | None]
    extended_at: int
    positions: list[list[int]] | None = None

    @property
    def context(self) -> list[int]:
        return self.prompt + self.response

    @property
    def n_sampled(self) -> int:
        return sum(call != CONTEXT for call in self.sampled_by)

    def answer_behind(self, index: int) -> tuple[int, list[int]]:
        """Start and tokens of the next answer at or after a token of the context.

        If the token belongs to an answer, it is that answer.
        """
        sampled_by = [CONTEXT] * len(self.prompt) + self.sampled_by
        begin = next(i for i in range(index, len(sampled_by)) if sampled_by[i] != CONTEXT)
        call = sampled_by[begin]
        places = [i for i, each in enumerate(sampled_by) if each == call]
        return places[0], [self.context[i] for i in places]

    def is_continued_by(self, turn: Turn) -> bool:
        context = self.context
        return turn.prompt[: len(context)] == context and self.changed_position(turn) is None

    def changed_position(self, turn: Turn) -> int | None:
        """The first token with another position in a prompt that begins with the context."""
        n_dims = len(self.positions or turn.positions or [])
        counted = [list(range(len(self.context)))] * n_dims
        own, other = self.positions or counted, turn.positions or counted
        changed = [
            token
            for token in range(len(self.context))
            if any(one[token] != another[token] for one, another in zip(own, other, strict=True))
        ]
        return min(changed, default=None)

    def extend(self, turn: Turn) -> None:
        added = turn.prompt[len(self.context) :]
        self._append(added, CONTEXT, [None] * len(added))
        self._append(turn.response, turn.index, turn.log_probs or [None] * len(turn.response))
        self.extended_at = turn.index
        self.positions = turn.positions

    def _append(self, tokens: list[int], call: int, log_probs: list[Any]) -> None:
        self.response += tokens
        self.sampled_by += [call] * len(tokens)
        self.log_probs += log_probs


def open_chain(turn: Turn) -> Chain:
    chain = Chain(turn.index, list(turn.prompt), [], [], [], turn.index)
    chain.extend(turn)
    return chain


def chain_per_call(turns: list[Turn]) -> list[Chain]:
    """One chain per call: level ``transition``."""
    return [open_chain(turn) for turn in turns]


def merge_into_chains(
    rollout_id: str, turns: list[Turn], tokenizer: Any
) -> tuple[list[Chain], list[Mismatch]]:
    """Merge calls into chains, in the order of their first calls; also the broken prefixes."""
    chains: list[Chain] = []
    mismatches: list[Mismatch] = []
    for turn in turns:
        continued = [chain for chain in chains if chain.is_continued_by(turn)]
        if continued:
            longest = max(continued, key=lambda chain: (len(chain.context), chain.extended_at))
            longest.extend(turn)
            continue
        if chains:
            mismatches.append(_mismatch(rollout_id, turn, chains, tokenizer))
        chains.append(open_chain(turn))
    return chains, mismatches


def _mismatch(rollout_id: str, turn: Turn, chains: list[Chain], tokenizer: Any) -> Mismatch:
    closest = max(
        chains,
        key=lambda chain: (shared_prefix(chain.context, turn.prompt), chain.extended_at),
    )
    index = shared_prefix(closest.context, turn.prompt)
    if index == len(closest.context):
        changed = closest.changed_position(turn)
        assert changed is not None  # otherwise the call would extend the chain
        return Mismatch(rollout_id, turn.index, changed, "positions_changed")
    kind = classify_mismatch(
        turn.prompt,
        closest.context,
        index,
        len(closest.prompt),
        answer=closest.answer_behind(index),
        tokenizer=tokenizer,
    )
    return Mismatch(rollout_id, turn.index, index, kind)


def shared_prefix(left: list[int], right: list[int]) -> int:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length


def classify_mismatch(
    prompt: list[int],
    context: list[int],
    index: int,
    first_prompt_length: int,
    *,
    answer: tuple[int, list[int]],
    tokenizer: Any = None,
) -> str:
    """Kind of a broken prefix: the prompt differs from the closest chain's context at ``index``.

    ``first_prompt_length`` tokens of the context are that chain's first prompt. ``answer`` is the
    start and tokens of the next answer at or after ``index``.
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
    """Whether only the tokens that the chat template puts before the answer differ.

    ``prompt`` begins at the first difference, as does ``expected``, which ends at the answer.
    ``is_first``: the difference lies in the chain's first prompt.
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
    """Whether the prompt continues with the text of the context in other tokens."""
    text = tokenizer.decode(context, skip_special_tokens=False).rstrip(_CUT_CHARACTER)
    return bool(tokenizer.decode(prompt, skip_special_tokens=False).startswith(text))
