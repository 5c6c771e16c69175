"""Token ids and log-probs out of answers, complete or streamed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from agl_fast.ops.parse import parse_token_ids
from agl_fast.proxy.answer_checks import (
    Asked,
    BadAnswerError,
    Ids,
    LogProbs,
    ModelLimits,
    NoTokenIdsError,
    believed,
    check_vocabulary,
    checked_log_probs,
)
from agl_fast.proxy.engines.base import ChoicePart, Engine
from agl_fast.proxy.engines.base import LogProbs as PartLogProbs


@dataclass(slots=True, eq=False)
class Choice:
    """One sampled answer.

    Attributes:
        prompt_ids, response_ids: int32, (N,).
        log_probs: float32, one for each of ``response_ids``, or None.
        finish_reason: why sampling ended, which the answer may hide (``Engine.finish_reason``).
        missing_log_probs: why ``log_probs`` is None: ``absent``, ``none`` or ``positive``.
    """

    index: int
    prompt_ids: Ids
    response_ids: Ids
    log_probs: LogProbs | None
    finish_reason: str | None
    missing_log_probs: str | None = None


def read_answer(
    body: bytes, engine: Engine, asked: Asked | None = None, limits: ModelLimits | None = None
) -> tuple[str, list[Choice]]:
    """The response id and the choices of a complete answer.

    Raises:
        BadAnswerError: as ``AnswerCollector.read_whole``.
    """
    collector = AnswerCollector(engine, asked, limits)
    choices = collector.read_whole(body)
    return collector.response_id, choices


@dataclass(slots=True, eq=False)
class _Parts:
    prompt_ids: Ids | None = None
    response_ids: list[Ids] = field(default_factory=list)
    n_ids: int = 0
    log_probs: list[float | None] = field(default_factory=list)
    has_log_probs: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class AnswerCollector:
    """The choices of one answer, out of its parts.

    Args:
        engine: of the server that answers.
        asked: facts of the request; None: one choice, and nothing known of it.
        limits: facts of the model; None: nothing known.
    """

    def __init__(
        self, engine: Engine, asked: Asked | None = None, limits: ModelLimits | None = None
    ) -> None:
        self._engine = engine
        self.asked = asked or Asked()
        self._limits = limits or ModelLimits()
        self.response_id = ""
        self.failed = False
        self._prompt_ids: Ids | None = None
        self._parts: dict[int, _Parts] = {}
        self._n_sampled = 0
        self._n_claimed: int | None = None  # by a usage of all choices

    @property
    def begun(self) -> bool:
        """A choice has begun, be it without ids."""
        return bool(self._parts) or self.failed

    @property
    def has_ids(self) -> bool:
        """Ids have come, or the end of a choice without any."""
        return any(
            parts.response_ids or parts.finish_reason is not None for parts in self._parts.values()
        )

    @property
    def has_prompt_ids(self) -> bool:
        return self._prompt_ids is not None or any(
            parts.prompt_ids is not None for parts in self._parts.values()
        )

    @property
    def complete(self) -> bool:
        """Every choice that was asked for, or that has begun, has its finish reason."""
        finished = sum(parts.finish_reason is not None for parts in self._parts.values())
        return finished >= max(1, self.asked.choices, len(self._parts))

    @property
    def n_sampled(self) -> int:
        """Tokens sampled so far: the ids that came, or more where the usage says so."""
        return max(self._n_sampled, _count(self._parts.values()))

    def add(self, part: bytes) -> bool:
        """A whole answer, an event of a stream, or an error in place of a stream's rest.

        Returns:
            Whether the part says no more than the usage of the whole answer.

        Raises:
            BadAnswerError: it cannot be read, or contradicts itself or what came before. Its ids
                count as sampled.
        """
        n_before = _count(self._parts.values())
        try:
            return self._add(part)
        except BadAnswerError:
            self._n_sampled = max(self._n_sampled, n_before + self._engine.ids_in(part))
            raise

    def _add(self, part: bytes) -> bool:
        try:
            answer = self._engine.decode_answer(part)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            before = {index: len(parts.log_probs) for index, parts in self._parts.items()}
            raise self._engine.explain_unreadable(part, error, before) from error
        if not _is_missing(answer.error):
            self.failed = True
            return False
        self.response_id = self.response_id or answer.id
        self._prompt_ids = _one_prompt(
            self._prompt_ids, _ids(answer.prompt_token_ids, "prompt_token_ids"), "the answer"
        )
        indices: list[int] = []
        for choice in answer.choices:
            index = self._index_of(choice, indices)
            indices.append(index)
            self._add_choice(part, choice, index)
        if answer.usage is not None and answer.usage.completion_tokens is not None:
            self._check_usage(answer.usage.completion_tokens, indices)
        return answer.usage is not None and not answer.choices

    def read_whole(self, body: bytes) -> list[Choice]:
        """The choices of an answer that is no stream.

        Raises:
            BadAnswerError: as ``add`` and ``choices``.
        """
        try:
            self.add(body)
        except BadAnswerError:
            claimed = self._engine.claimed_tokens(body, self._limits.longest_answer)
            self._n_sampled = max(self._n_sampled, claimed)
            raise
        return self.choices()

    def _index_of(self, choice: ChoicePart, before: list[int]) -> int:
        """
        Args:
            before: indices of the choices before it in the same part of the answer.
        """
        if choice.index is None and self.asked.choices > 1:
            raise BadAnswerError(
                "choices", f"a choice has no index, and {self.asked.choices} were asked for"
            )
        index = choice.index or 0
        if index < 0:
            raise BadAnswerError("choices", f"a choice has the index {index}")
        if index in before:
            raise BadAnswerError("choices", f"choice {index} comes twice in one part of the answer")
        return index

    def _add_choice(self, part: bytes, choice: ChoicePart, index: int) -> None:
        parts = self._parts.setdefault(index, _Parts())
        prompt_ids = _ids(choice.prompt_token_ids, f"choice {index}: prompt_token_ids")
        parts.prompt_ids = _one_prompt(parts.prompt_ids, prompt_ids, f"choice {index}")
        ids = _ids(choice.token_ids, f"choice {index}: token_ids")
        n_ids = 0 if ids is None else len(ids)
        # Text that a stop string or a character in pieces has held back may end an answer.
        ends = ids is not None and choice.finish_reason is not None and parts.n_ids > 0
        if n_ids == 0 and not ends:
            self._refuse_text_without_ids(part, parts, index)
        if n_ids and parts.finish_reason is not None:
            raise BadAnswerError(
                "after_finish",
                f"choice {index}: {n_ids} token ids come after the finish reason "
                f"{parts.finish_reason!r} and {parts.n_ids} ids",
            )
        if choice.finish_reason is not None:
            if parts.finish_reason not in (None, choice.finish_reason):
                raise BadAnswerError(
                    "after_finish",
                    f"choice {index} has the finish reasons {parts.finish_reason!r} and "
                    f"{choice.finish_reason!r}",
                )
            parts.finish_reason = choice.finish_reason
            parts.stop_reason = choice.stop_reason
        if ids is not None:
            self._add_log_probs(index, parts, choice.logprobs, n_ids)
            parts.response_ids.append(ids)
            parts.n_ids += n_ids
            if n_ids and self._n_claimed is not None:
                raise BadAnswerError(
                    "usage",
                    f"choice {index}: {n_ids} token ids come after the usage of the whole answer, "
                    f"whose completion_tokens is {self._n_claimed}",
                )
        elif choice.logprobs is not None and choice.logprobs.values:
            raise BadAnswerError(
                "log_probs",
                f"choice {index}: {len(choice.logprobs.values)} log-probs came without token_ids, "
                f"after {parts.n_ids} ids",
            )

    def _refuse_text_without_ids(self, part: bytes, parts: _Parts, index: int) -> None:
        if self.asked.repeats_text or not self._engine.has_text(part, index):
            return
        detail = (
            f"choice {index} has text without token_ids: of this part of the answer 0 ids came, "
            f"{parts.n_ids} before it"
        )
        if parts.n_ids == 0:
            raise NoTokenIdsError(detail)
        raise BadAnswerError("token_ids", detail)

    def _add_log_probs(
        self, index: int, parts: _Parts, log_probs: PartLogProbs | None, n_ids: int
    ) -> None:
        """The part's log-probs: one for each of its ids, or none at all."""
        values = log_probs.values if log_probs is not None else []
        expected = n_ids
        if self.asked.echo and parts.n_ids == 0 and not parts.response_ids:
            prompt_ids = self._prompt_ids if parts.prompt_ids is None else parts.prompt_ids
            n_prompt = 0 if prompt_ids is None else len(prompt_ids)
            if self.asked.samples_nothing:  # those of the prompt alone
                values = [None] * n_ids if len(values) == n_prompt else values
            elif values:
                expected += n_prompt
            if len(values) == expected:
                values = values[len(values) - n_ids :]
                expected = n_ids
        if values and len(values) != expected:
            raise BadAnswerError(
                "log_probs",
                f"choice {index}: {len(values)} log-probs came with {expected} token ids, "
                f"after {parts.n_ids} ids",
            )
        parts.has_log_probs |= bool(values)
        parts.log_probs += values or [None] * n_ids

    def _check_usage(self, n_tokens: int, indices: list[int]) -> None:
        """A usage counts the choices of its event, or all of them."""
        counted = [self._parts[index] for index in indices] or self._parts.values()
        n_ids = _count(counted)
        if len(counted) == len(self._parts):
            most = self._limits.longest_answer * max(1, len(self._parts))
            self._n_sampled = max(self._n_sampled, believed(n_tokens, most))
        if not indices and n_tokens:
            self._n_claimed = n_tokens
        if n_ids != n_tokens:
            names = sorted(indices or self._parts)
            which = f"choice {names[0]}" if len(names) == 1 else f"choices {names}"
            raise BadAnswerError(
                "usage",
                f"{which}: usage.completion_tokens is {n_tokens}, but {n_ids} token ids came",
            )

    def choices(self) -> list[Choice]:
        """The choices in order of their index.

        Raises:
            NoTokenIdsError: one lacks its token ids or the prompt's.
            BadAnswerError: there are too few choices, or one cannot be a row.
        """
        if self.failed:
            raise BadAnswerError("choices", "it is an error, with status 200")
        if not self._parts:
            raise BadAnswerError("choices", "it has no choices")
        if len(self._parts) < self.asked.choices or sorted(self._parts) != [
            *range(len(self._parts))
        ]:
            raise BadAnswerError(
                "choices",
                f"it has the choices {sorted(self._parts)}, {self.asked.choices} were asked for",
            )
        return [self._choice(index, parts) for index, parts in sorted(self._parts.items())]

    def _choice(self, index: int, parts: _Parts) -> Choice:
        prompt_ids = self._prompt_ids if parts.prompt_ids is None else parts.prompt_ids
        missing = [] if prompt_ids is not None else ["prompt_token_ids"]
        missing += [] if parts.response_ids else ["token_ids"]
        if prompt_ids is None or not parts.response_ids:
            raise NoTokenIdsError(f"choice {index} lacks {' and '.join(missing)}")
        one = len(parts.response_ids) == 1
        response_ids = parts.response_ids[0] if one else np.concatenate(parts.response_ids)
        if self.asked.samples_nothing:
            response_ids, parts.log_probs = response_ids[:0], []
        size = self._limits.vocabulary_size
        check_vocabulary(index, "prompt_token_ids", prompt_ids, size)
        check_vocabulary(index, "token_ids", response_ids, size)
        log_probs: LogProbs | None = None
        why: str | None = "absent"
        if parts.has_log_probs or not len(response_ids):
            log_probs, why = checked_log_probs(index, parts.log_probs, self._engine)
        return Choice(
            index,
            prompt_ids,
            response_ids,
            log_probs,
            self._engine.finish_reason(
                parts.finish_reason,
                parts.stop_reason,
                len(prompt_ids),
                response_ids,
                self.asked,
                self._limits,
            ),
            why,
        )


def _count(parts: Iterable[_Parts]) -> int:
    return sum(each.n_ids for each in parts)


def _ids(raw: msgspec.Raw, where: str) -> Ids | None:
    if _is_missing(raw):
        return None
    try:
        return parse_token_ids(bytes(raw))
    except ValueError as error:
        raise BadAnswerError("token_ids", f"{where}: {error}") from error


def _one_prompt(known: Ids | None, again: Ids | None, whose: str) -> Ids | None:
    if known is None or again is None:
        return again if known is None else known
    if not np.array_equal(known, again):
        raise BadAnswerError(
            "token_ids",
            f"{whose} has two different prompt_token_ids, of {len(known)} and {len(again)} ids",
        )
    return known


def _is_missing(raw: msgspec.Raw) -> bool:
    return bytes(raw) in (b"", b"null")
