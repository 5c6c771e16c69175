"""What recording needs of vLLM's answers and events, decoded; the rest is skipped."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from agl_fast.proxy import large_json
from agl_fast.proxy.large_json import LargeValue

T = TypeVar("T")


# Fields that are named here are all that is decoded of an answer. Ids stay raw text for the native
# parser; they are most of the answer.
class TokenLogProb(msgspec.Struct):
    logprob: float | None = None  # vLLM's events leave its default, -9999.0, out


class LogProbLists(msgspec.Struct):
    content: list[TokenLogProb] | None = None  # chat
    token_logprobs: list[float | None] | None = None  # completions

    @property
    def values(self) -> list[float | None]:
        if self.content is not None:
            return [token.logprob for token in self.content]
        return self.token_logprobs or []


class ChoicePart(msgspec.Struct):
    index: int | None = None
    token_ids: msgspec.Raw = msgspec.Raw()
    prompt_token_ids: msgspec.Raw = msgspec.Raw()  # completions
    logprobs: LogProbLists | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Usage(msgspec.Struct):
    completion_tokens: int | None = None


class AnswerPart(msgspec.Struct):
    id: str = ""
    prompt_token_ids: msgspec.Raw = msgspec.Raw()  # chat
    choices: list[ChoicePart] = []
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw()  # an event in place of an answer's rest


_ANSWER = msgspec.json.Decoder(AnswerPart)
_CHOICE = msgspec.json.Decoder(ChoicePart)
_CHOICES = msgspec.json.Decoder(list[ChoicePart])
_LOG_PROBS = msgspec.json.Decoder(LogProbLists)
_TOKENS = msgspec.json.Decoder(list[TokenLogProb])
_NUMBERS = msgspec.json.Decoder(list[float | None])


def decode_answer(text: bytes) -> AnswerPart:
    """A whole answer, or an event of a stream; a large one piece by piece.

    Raises:
        msgspec.DecodeError, ValueError, RecursionError: it is not JSON, or not of such a form.
    """
    if len(text) <= large_json.LARGE_BYTES:
        return _ANSWER.decode(text)
    members = LargeValue(text, 0, len(text), constants=False).member_texts()
    choices = members.get("choices")
    if choices is None or not choices.is_array:
        return _ANSWER.decode(_object_of(AnswerPart, members))
    answer = _ANSWER.decode(_object_of(AnswerPart, members, without="choices"))
    answer.choices = []
    for run in choices.runs():
        if isinstance(run, LargeValue):
            answer.choices.append(_large_choice(run))
        else:
            answer.choices += _CHOICES.decode(run)
    return answer


def _large_choice(choice: LargeValue) -> ChoicePart:
    if not choice.is_object:
        return _CHOICE.decode(choice.text)
    members = choice.member_texts()
    log_probs = members.get("logprobs")
    if log_probs is None or not log_probs.is_object:
        return _CHOICE.decode(_object_of(ChoicePart, members))
    part = _CHOICE.decode(_object_of(ChoicePart, members, without="logprobs"))
    part.logprobs = _log_probs(log_probs)
    return part


def _log_probs(log_probs: LargeValue) -> LogProbLists:
    members = log_probs.member_texts()
    lists = {
        name: members.pop(name)
        for name in ("content", "token_logprobs")
        if name in members and members[name].is_array
    }
    found = _LOG_PROBS.decode(_object_of(LogProbLists, members))
    if "content" in lists:
        found.content = _elements(_TOKENS, lists["content"])
    if "token_logprobs" in lists:
        found.token_logprobs = _elements(_NUMBERS, lists["token_logprobs"])
    return found


def _elements(decoder: msgspec.json.Decoder[list[T]], array: LargeValue) -> list[T]:
    elements: list[T] = []
    for run in array.runs():
        elements += decoder.decode(run if isinstance(run, bytes) else run.as_array())
    return elements


def _object_of(
    kind: type[msgspec.Struct], members: dict[str, LargeValue], without: str = ""
) -> bytes:
    """JSON of the members that the kind has."""
    kept = [
        b"".join((b'"', name.encode(), b'":', members[name].text))
        for name in kind.__struct_fields__
        if name in members and name != without
    ]
    return b"{%b}" % b",".join(kept)
