"""Token ids and log-probs out of vLLM's answers, complete or streamed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from agl_fast.ops.parse import parse_token_ids

Ids: TypeAlias = NDArray[np.int32]


class NoTokenIdsError(ValueError):
    """A server's answer lacks the token ids it was asked for, or they cannot be read."""


@dataclass(slots=True, eq=False)
class Choice:
    """One sampled answer: ids int32 of shape (N,), log-probs float32 of shape (N,) or None."""

    index: int
    prompt_ids: Ids
    response_ids: Ids
    log_probs: NDArray[np.float32] | None
    finish_reason: str | None


# Fields that are named here are all that is decoded of an answer. Ids stay raw text for the native
# parser; they are most of the answer.
class _TokenLogProb(msgspec.Struct):
    logprob: float


class _LogProbs(msgspec.Struct):
    content: list[_TokenLogProb] | None = None  # chat
    token_logprobs: list[float | None] | None = None  # completions


class _Choice(msgspec.Struct):
    index: int = 0
    token_ids: msgspec.Raw = msgspec.Raw()
    prompt_token_ids: msgspec.Raw = msgspec.Raw()  # completions
    logprobs: _LogProbs | None = None
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    id: str = ""
    prompt_token_ids: msgspec.Raw = msgspec.Raw()  # chat
    choices: list[_Choice] = []
    error: msgspec.Raw = msgspec.Raw()  # an event in place of an answer's rest


_DECODER = msgspec.json.Decoder(_Answer)


def read_answer(body: bytes) -> tuple[str, list[Choice]]:
    """The response id and the choices of a complete answer.

    Raises:
        NoTokenIdsError: a choice lacks its token ids, or the prompt's.
    """
    collector = AnswerCollector()
    collector.add(body)
    return collector.response_id, collector.choices()


@dataclass(slots=True, eq=False)
class _Parts:
    prompt_ids: Ids | None = None
    response_ids: list[Ids] = field(default_factory=list)
    log_probs: list[float | None] = field(default_factory=list)
    finish_reason: str | None = None


class AnswerCollector:
    """The choices of one answer, out of its parts."""

    def __init__(self) -> None:
        self.response_id = ""
        self.failed = False
        self._prompt_ids: Ids | None = None
        self._parts: dict[int, _Parts] = {}

    @property
    def begun(self) -> bool:
        return bool(self._parts) or self.failed

    @property
    def has_prompt_ids(self) -> bool:
        return self._prompt_ids is not None or any(
            parts.prompt_ids is not None for parts in self._parts.values()
        )

    @property
    def finished_choices(self) -> int:
        return sum(parts.finish_reason is not None for parts in self._parts.values())

    def add(self, part: bytes) -> None:
        """A whole answer, an event of a stream, or an error in place of a stream's rest.

        Raises:
            NoTokenIdsError: it is none of these.
        """
        try:
            answer = _DECODER.decode(part)
        except msgspec.DecodeError as error:
            raise NoTokenIdsError(f"the server's answer cannot be read: {error}") from error
        if not _is_missing(answer.error):
            self.failed = True
            return
        self.response_id = self.response_id or answer.id
        if self._prompt_ids is None:
            self._prompt_ids = _ids(answer.prompt_token_ids)
        for choice in answer.choices:
            parts = self._parts.setdefault(choice.index, _Parts())
            if parts.prompt_ids is None:
                parts.prompt_ids = _ids(choice.prompt_token_ids)
            if (ids := _ids(choice.token_ids)) is not None:
                parts.response_ids.append(ids)
            if choice.logprobs is not None:
                parts.log_probs += _log_probs(choice.logprobs)
            parts.finish_reason = choice.finish_reason or parts.finish_reason

    def choices(self) -> list[Choice]:
        """The choices in order of their index.

        Raises:
            NoTokenIdsError: there is none, or one lacks its token ids or the prompt's.
        """
        if not self._parts:
            raise NoTokenIdsError("the server's answer has no choices")
        return [self._choice(index, parts) for index, parts in sorted(self._parts.items())]

    def _choice(self, index: int, parts: _Parts) -> Choice:
        prompt_ids = self._prompt_ids if parts.prompt_ids is None else parts.prompt_ids
        missing = "prompt_token_ids" if prompt_ids is None else ""
        if not parts.response_ids:
            missing = f"{missing} token_ids".strip()
        if prompt_ids is None or not parts.response_ids:
            raise NoTokenIdsError(
                f"choice {index} of the server's answer lacks {missing.replace(' ', ' and ')}"
            )
        one = len(parts.response_ids) == 1
        response_ids = parts.response_ids[0] if one else np.concatenate(parts.response_ids)
        # An echoed prompt has log-probs, too, in front.
        log_probs = parts.log_probs[len(parts.log_probs) - len(response_ids) :]
        complete = len(log_probs) == len(response_ids) and None not in log_probs
        return Choice(
            index,
            prompt_ids,
            response_ids,
            np.array(log_probs, np.float32) if complete else None,
            parts.finish_reason,
        )


def _ids(raw: msgspec.Raw) -> Ids | None:
    if _is_missing(raw):
        return None
    try:
        return parse_token_ids(bytes(raw))
    except ValueError as error:
        raise NoTokenIdsError(f"the server's answer has bad token ids: {error}") from error


def _is_missing(raw: msgspec.Raw) -> bool:
    return bytes(raw) in (b"", b"null")


def _log_probs(log_probs: _LogProbs) -> list[float | None]:
    if log_probs.content is not None:
        return [token.logprob for token in log_probs.content]
    return log_probs.token_logprobs or []


class EventReader:
    """Data of server-sent events out of bytes as they arrive."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The data of each event that the chunk completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []
