"""What the proxy needs to know of an inference engine.

An engine is a module of this package that implements `Engine`; `engine_named` finds it. An engine's
module has only what differs between engines. What OpenAI's API defines is in the other modules of
the proxy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, cast

import msgspec

if TYPE_CHECKING:
    from agl_fast.proxy.answer_checks import Asked, BadAnswerError, Ids, ModelLimits
    from agl_fast.proxy.sampling import SamplingPolicy

Endpoint: TypeAlias = Literal["/v1/chat/completions", "/v1/completions"]
CHAT: Endpoint = "/v1/chat/completions"
COMPLETIONS: Endpoint = "/v1/completions"

# litellm's names of OpenAI-compatible servers, in front of the model's own name in a model list.
MODEL_PREFIXES = ("hosted_vllm/", "openai/")

# A tool whose schema the answer must fit, as a recorded call names it.
STRICT_TOOLS = "tools.function.strict"

# passed: the server gets what the agent sent. The field is part of the prompt, ends an answer,
#   formats it or schedules it; tokens are drawn as without it.
# recording: the proxy sets it in every recorded call, as rows need ids and log-probs.
# removed: it never reaches the server.
# run: training samples with the run's value (sampling: enforce).
# neutral: training samples with the neutral value (sampling: enforce).
# form: it constrains which tokens an answer may have. The agent depends on it, so that it stays,
#   and training calls that have it are counted and named.
# refused: a training call that has it is answered with 400.
Treatment: TypeAlias = Literal[
    "passed", "recording", "removed", "run", "neutral", "form", "refused"
]


@dataclass(frozen=True, slots=True)
class Field:
    """One field.

    Attributes:
        without_effect: values that are as good as none, besides null. The first one is the
            neutral value.
        explicit: the neutral value goes out with every training call, as the model's
            generation_config.json would fill it in otherwise.
        because: why it is refused, and what to send instead.
    """

    treatment: Treatment
    without_effect: tuple[Any, ...] = ()
    explicit: bool = False
    because: str = ""


class LogProbs(Protocol):
    """Log-probs of a part of a choice, one for each of its token ids."""

    @property
    def values(self) -> list[float | None]: ...


class ChoicePart(Protocol):
    """One choice in a part of an answer. Ids are raw JSON; null or empty: there are none."""

    @property
    def index(self) -> int | None: ...
    @property
    def token_ids(self) -> msgspec.Raw: ...
    @property
    def prompt_token_ids(self) -> msgspec.Raw: ...
    @property
    def logprobs(self) -> LogProbs | None: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def stop_reason(self) -> int | str | None: ...


class Usage(Protocol):
    @property
    def completion_tokens(self) -> int | None: ...


class AnswerPart(Protocol):
    """A whole answer, or an event of a stream. ``error``: JSON in place of an answer's rest."""

    @property
    def id(self) -> str: ...
    @property
    def prompt_token_ids(self) -> msgspec.Raw: ...
    @property
    def choices(self) -> Sequence[ChoicePart]: ...
    @property
    def usage(self) -> Usage | None: ...
    @property
    def error(self) -> msgspec.Raw: ...


class Engine(Protocol):
    """An inference engine with an OpenAI-compatible server.

    Attributes:
        NAME: in messages.
        SERVED_MODEL_KEY: verl's key of the name by which the servers know the model.
        HEALTH_PATH: answers with a status below 500 while the server works.
        KEEP_ALIVE_SECONDS: connections that were idle for so long are not used again.
        HEADERS_OF_ONE_ANSWER: request headers, in lower case, that would name several answers
            alike, and are not forwarded.
        MEDIA_REFERENCE: key of a message part whose content is in the server's cache.
        FIELDS: what the proxy does with each field of a request.
        RUN, NEUTRAL, EXPLICIT: of these, sampling parameters of the run; neutral values of others;
            neutral values that every training call states.
        REPLACED_BECAUSE: why the proxy replaces a field, by name.
        TOKEN_IDS_SINCE: the version that returns token ids, and how they are requested.
    """

    @property
    def NAME(self) -> str: ...
    @property
    def SERVED_MODEL_KEY(self) -> str: ...
    @property
    def HEALTH_PATH(self) -> str: ...
    @property
    def KEEP_ALIVE_SECONDS(self) -> float: ...
    @property
    def HEADERS_OF_ONE_ANSWER(self) -> frozenset[str]: ...
    @property
    def MEDIA_REFERENCE(self) -> str: ...
    @property
    def FIELDS(self) -> Mapping[Endpoint, Mapping[str, Field]]: ...
    @property
    def RUN(self) -> tuple[str, ...]: ...
    @property
    def NEUTRAL(self) -> Mapping[str, Any]: ...
    @property
    def EXPLICIT(self) -> Mapping[str, Any]: ...
    @property
    def REPLACED_BECAUSE(self) -> Mapping[str, str]: ...
    @property
    def TOKEN_IDS_SINCE(self) -> str: ...

    # Values of a request, as the engine reads them.

    def is_on(self, value: Any) -> bool:
        """Whether a JSON value is read as true."""

    def number(self, value: Any) -> int | None:
        """A JSON value read as an integer; None: it is none."""

    def has_effect(self, field: Field, value: Any) -> bool:
        """Whether a value of a field changes anything."""

    def is_same(self, name: str, theirs: Any, ours: Any) -> bool:
        """Whether two values of a sampling parameter mean the same."""

    # Requests.

    def for_recording(
        self, body: Mapping[str, Any], endpoint: Endpoint
    ) -> tuple[dict[str, Any], list[str]]:
        """The body with ids and log-probs requested; names of the agent's fields it replaces."""

    def usage_options(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Fields with which a stream ends in its usage: how many ids there must be."""

    def sampling_parameters(self, policy: SamplingPolicy) -> dict[str, Any]:
        """The sampling parameters that every call carries."""

    def has_strict_tools(self, body: Mapping[str, Any]) -> bool:
        """Whether a tool constrains what is sampled."""

    def loosened(self, tools: Any) -> list[Any]:
        """The tools without that constraint."""

    def asked(
        self, agents: Mapping[str, Any], sent: Mapping[str, Any], endpoint: Endpoint, choices: int
    ) -> Asked:
        """What a request says of its answer.

        Args:
            agents: the body that the agent sent.
            sent: the body that goes to the server.
            choices: how many the answer will have.
        """

    # Answers.

    def decode_answer(self, text: bytes) -> AnswerPart:
        """A whole answer, or an event of a stream.

        Raises:
            msgspec.DecodeError, ValueError, RecursionError: it is not JSON, or not of such a form.
        """

    def explain_unreadable(
        self, part: bytes, error: Exception, n_before: Mapping[int, int]
    ) -> BadAnswerError:
        """What is wrong with an answer, or an event, that cannot be decoded.

        Args:
            n_before: log-probs of each choice in the events before.
        """

    def has_text(self, part: bytes, choice: int) -> bool:
        """Whether an event, or an answer, has text, reasoning or a tool call of the choice."""

    def ids_in(self, part: bytes) -> int:
        """Token ids in an answer, or an event, that is refused."""

    def claimed_tokens(self, body: bytes, longest: int) -> int:
        """Sampled tokens by the usage of a whole answer that is refused.

        Args:
            longest: tokens that a choice can have; a usage that says more is not believed.
        """

    def is_no_log_prob(self, value: float) -> bool:
        """Whether a number stands for "none"."""

    def finish_reason(
        self,
        said: str | None,
        stop_reason: Any,
        n_prompt: int,
        response_ids: Ids,
        asked: Asked,
        limits: ModelLimits,
    ) -> str | None:
        """Why sampling ended, which the answer's finish reason may hide.

        Args:
            said: the answer's finish reason.
            stop_reason: what else the answer says of it.
            n_prompt: tokens of the prompt.
        """

    def exceeds_context(self, refusal: bytes) -> bool:
        """Whether a request got status 400 as prompt and limit together exceed the context."""


def engine_named(name: str) -> Engine:
    """The engine of a module of this package.

    Raises:
        ValueError: there is none of that name.
    """
    module = f"{__package__}.{name}"
    try:
        return cast(Engine, import_module(module))
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ValueError(f"the proxy knows no engine {name!r}") from None
