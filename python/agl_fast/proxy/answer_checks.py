"""What an answer may say: facts of its request and of the model that it must agree with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from agl_fast.printable import shown
from agl_fast.proxy.engines.base import Engine

Ids: TypeAlias = NDArray[np.int32]
LogProbs: TypeAlias = NDArray[np.float32]

# A log-prob is rounded in float32: logits in the hundreds leave an error of this size above 0.
ROUNDING = 1e-4
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
        context_length: the longest prompt and answer together (``max_model_len``).
        end_ids: ids that end an answer without being a ``stop_reason`` (the tokenizer's EOS).
        max_tokens: of every answer, whatever the request's limit (the servers'
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

    @property
    def samples_nothing(self) -> bool:
        """The answer has a token all the same, sampled for the prompt's log-probs."""
        return self.echo and self.max_tokens == 0


def checked_log_probs(
    choice: int, values: Sequence[float | None], engine: Engine
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
        elif engine.is_no_log_prob(value):
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


def believed(n_tokens: Any, most: int) -> int:
    """A usage's number of sampled tokens; 0: it is no such number."""
    is_number = isinstance(n_tokens, int) and not isinstance(n_tokens, bool)
    return n_tokens if is_number and 0 <= n_tokens <= most else 0
