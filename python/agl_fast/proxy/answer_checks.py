"""What an answer may say: facts of its request and of the model that it must agree with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from agl_fast.printable import shown
from agl_fast.proxy.large_json import (
    LargeValue,
    decoded,
    elements_of,
    members_of,
    read_json,
)
from agl_fast.proxy.request_values import is_on, number

Ids: TypeAlias = NDArray[np.int32]
LogProbs: TypeAlias = NDArray[np.float32]

# vLLM's log-prob of a token that it has none of, and the lowest that it returns.
NO_LOG_PROB = -9999.0
# A log-prob is rounded in float32: logits in the hundreds leave an error of this size above 0.
ROUNDING = 1e-4
# vLLM's default of /v1/completions.
_COMPLETIONS_MAX_TOKENS = 16
# Of a choice, where the context's length is not known.
_MOST_TOKENS = 1 << 24

Cause: TypeAlias = Literal[
    "unreadable", "choices", "token_ids", "vocabulary", "log_probs", "usage", "after_finish"
]


class BadAnswerError(ValueError):
    """An answer that cannot be a row, or contradicts itself. The message says where and how.

    Attributes:
        cause: what is wrong, as it is counted.
    """

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class NoTokenIdsError(BadAnswerError):
    """An answer lacks the token ids that the server was asked for."""

    def __init__(self, message: str) -> None:
        super().__init__("token_ids", message)


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Facts of the served model. What is not known is not checked.

    Attributes:
        vocabulary_size: rows of the model's embedding; ids are below it.
        context_length: the longest prompt and answer together (vLLM's ``max_model_len``).
        end_ids: ids that end an answer without being a ``stop_reason`` (the tokenizer's EOS).
        max_tokens: of every answer, whatever the request's limit (vLLM's
            ``override_generation_config``).
    """

    vocabulary_size: int | None = None
    context_length: int | None = None
    end_ids: frozenset[int] = frozenset()
    max_tokens: int | None = None

    @property
    def longest_answer(self) -> int:
        """Tokens that a choice cannot exceed."""
        return _MOST_TOKENS if self.context_length is None else self.context_length


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request says of its answer.

    Attributes:
        choices: how many the answer has.
        max_tokens: the most tokens of a choice; None: the server decides.
        echo: a completion's log-probs begin with the prompt's.
        repeats_text: text of the prompt comes without ids (``echo`` at either endpoint).
        ignores_end: the end ids do not end an answer.
        wants_usage: the agent asked for a stream's usage event.
    """

    choices: int = 1
    max_tokens: int | None = None
    echo: bool = False
    repeats_text: bool = False
    ignores_end: bool = False
    wants_usage: bool = True

    @classmethod
    def of(
        cls, agents: Mapping[str, Any], sent: Mapping[str, Any], *, is_chat: bool, choices: int
    ) -> Asked:
        """
        Args:
            agents: the body that the agent sent.
            sent: the body that goes to the server.
            choices: how many the answer will have.
        """
        if is_chat:
            limit = sent.get("max_completion_tokens")
            limit = sent.get("max_tokens") if limit is None else limit
        else:
            limit = sent.get("max_tokens")
            limit = _COMPLETIONS_MAX_TOKENS if limit is None else limit
        options = decoded(agents.get("stream_options"))
        return cls(
            choices=choices,
            max_tokens=number(limit),
            echo=not is_chat and is_on(sent.get("echo")),
            repeats_text=is_on(sent.get("echo")),
            ignores_end=is_on(sent.get("ignore_eos")),
            wants_usage=isinstance(options, Mapping) and is_on(options.get("include_usage")),
        )

    @property
    def samples_nothing(self) -> bool:
        """vLLM samples a token for the prompt's log-probs and returns it."""
        return self.echo and self.max_tokens == 0


def usage_options(body: Mapping[str, Any]) -> dict[str, Any]:
    """``stream_options`` with which a stream ends in its usage: how many ids there must be."""
    if not is_on(body.get("stream")):
        return {}
    given = decoded(body.get("stream_options"))
    if given is None:
        given = {}
    if not isinstance(given, Mapping) or is_on(given.get("include_usage")):
        return {}
    return {"stream_options": {**given, "include_usage": True, "continuous_usage_stats": False}}


def checked_log_probs(
    choice: int, values: Sequence[float | None]
) -> tuple[LogProbs | None, str | None]:
    """Log-probs as a row has them: finite, at most 0. One that rounding put above 0 becomes 0.

    Returns:
        (N,) or None where one is missing, and why: ``none`` or ``positive``.

    Raises:
        BadAnswerError: one is not finite in float32.
    """
    missing: str | None = None
    largest = float(np.finfo(np.float32).max)
    for index, value in enumerate(values):
        if value is None:
            missing = missing or "none"
        elif not -largest <= value <= largest:  # NaN, too
            raise bad_log_prob(choice, index, value)
        elif value <= NO_LOG_PROB:
            missing = missing or "none"
        elif value > ROUNDING:
            missing = missing or "positive"
    if missing is not None:
        return None, missing
    return np.minimum(np.array(values, np.float32), np.float32(0.0)), None


def bad_log_prob(choice: int, token: int, value: Any) -> BadAnswerError:
    found = type(value).__name__ if isinstance(value, (dict, list)) else shown(value)
    return BadAnswerError(
        "log_probs",
        f"choice {choice}: the log-prob of token {token} is {found}, expected a finite number of "
        "at most 0",
    )


def check_vocabulary(choice: int, name: str, ids: Ids, size: int | None) -> None:
    """
    Raises:
        BadAnswerError: an id is outside the model's vocabulary.
    """
    if size is None or len(ids) == 0 or int(ids.max()) < size:
        return
    index = int(np.argmax(ids >= size))
    raise BadAnswerError(
        "vocabulary",
        f"choice {choice}: {name}[{index}] is {ids[index]}, but the model has {size} token ids, "
        "0 to " + str(size - 1),
    )


def finish_reason(
    said: str | None,
    stop_reason: Any,
    n_prompt: int,
    response_ids: Ids,
    asked: Asked,
    limits: ModelLimits,
) -> str | None:
    """Why sampling ended.

    vLLM says ``tool_calls`` of an answer with a tool call whatever ended it. The rules are those of
    its ``check_stop``: an id that ends the text comes before a limit, both come before an abort.

    Args:
        said: the answer's finish reason.
        stop_reason: the answer's: a stop string, an id that stops, ``repetition_detected``.
        n_prompt: tokens of the prompt.
    """
    if said != "tool_calls":
        return said
    if stop_reason is not None:
        return "repetition" if stop_reason == "repetition_detected" else said
    if len(response_ids) and not asked.ignores_end and int(response_ids[-1]) in limits.end_ids:
        return said
    context = limits.context_length
    most = min((n for n in (asked.max_tokens, limits.max_tokens) if n is not None), default=None)
    if most is not None and len(response_ids) >= most:
        return "length"
    if context is not None and n_prompt + len(response_ids) >= context:
        return "length"
    # Nothing else ends an answer, once the ids that do and both limits are known.
    if limits.end_ids and context is not None and most is not None:
        return "abort"
    return said


def explain_unreadable(
    part: bytes, error: Exception, n_before: Mapping[int, int]
) -> BadAnswerError:
    """What is wrong with an answer, or an event of a stream, that cannot be decoded.

    Args:
        n_before: log-probs of each choice in the events before.
    """
    try:
        answer = read_json(part)  # takes NaN and Infinity, which are no JSON
    except (ValueError, RecursionError):
        return BadAnswerError("unreadable", f"it is not JSON: {error}")
    for choice in elements_of((members_of(answer) or {}).get("choices")):
        members = members_of(choice) or {}
        index = members.get("index", 0)
        before = n_before.get(index, 0) if isinstance(index, int) else 0
        for position, value in enumerate(_values_of(members.get("logprobs"))):
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and abs(value) < float("inf")):
                return bad_log_prob(index, before + position, value)
    return BadAnswerError("unreadable", f"it cannot be read: {error}")


def _values_of(log_probs: Any) -> Iterator[Any]:
    members = members_of(log_probs) or {}
    content = members.get("content")
    if isinstance(content, (list, LargeValue)):
        for each in elements_of(content):
            token = members_of(each)
            yield each if token is None else token.get("logprob")
    else:
        yield from elements_of(members.get("token_logprobs"))


def has_text(part: bytes, choice: int) -> bool:
    """Whether an event, or an answer, has text, reasoning or a tool call of the choice."""
    for each in elements_of((members_of(read_json(part)) or {}).get("choices")):
        members = members_of(each) or {}
        if members.get("index", 0) != choice:
            continue
        if members.get("text"):
            return True
        said = members.get("delta") or members.get("message")
        told = members_of(said)
        if told is None:
            return bool(said)
        return any(value for name, value in told.items() if name != "role")
    return False


def ids_in(part: bytes) -> int:
    """Token ids in an answer, or an event, that is refused."""
    try:
        answer = members_of(read_json(part)) or {}
    except (ValueError, RecursionError):
        return 0
    choices = elements_of(answer.get("choices"))
    return sum(_length((members_of(each) or {}).get("token_ids")) for each in choices)


def claimed_tokens(body: bytes, longest: int) -> int:
    """Sampled tokens by the usage of a whole answer that is refused.

    Args:
        longest: tokens that a choice can have; a usage that says more is not believed.
    """
    try:
        answer = members_of(read_json(body)) or {}
    except (ValueError, RecursionError):
        return 0
    claimed = (members_of(answer.get("usage")) or {}).get("completion_tokens")
    return believed(claimed, longest * max(1, _length(answer.get("choices"))))


def _length(value: Any) -> int:
    if isinstance(value, LargeValue):
        return value.count() if value.is_array else 0
    return len(value) if isinstance(value, list) else 0


def believed(n_tokens: Any, most: int) -> int:
    """A usage's number of sampled tokens; 0: it is no such number."""
    is_number = isinstance(n_tokens, int) and not isinstance(n_tokens, bool)
    return n_tokens if is_number and 0 <= n_tokens <= most else 0
