"""An agent's request as a server gets it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agl_fast.proxy.engines.base import (
    CHAT,
    COMPLETIONS,
    STRICT_TOOLS,
    Endpoint,
    Engine,
    Treatment,
)
from agl_fast.proxy.large_json import LargeValue, elements_of, encoded, read_object
from agl_fast.proxy.media import media_of
from agl_fast.proxy.sampling import Phase, deviations, sampling_of

_UNTRAINED = "send the header X-AGL-Train: 0 with a call that is not trained"


class BadRequestError(ValueError):
    """The agent's request cannot be understood; the message is for the agent."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What goes to the server.

    Attributes:
        body: the JSON object, large values as ``LargeValue``.
        recorded: the answer becomes a call. Otherwise the request goes out as it came.
        capped: ``max_tokens`` is ours.
        choices: how many the answer will have.
        sampling: what the request states after our changes, without neutral values.
        overridden: the agent's value and the run's, by parameter, where the run's went out.
        deviating: the same where the agent's went out.
        unenforced: parameters that change what is sampled and that the trainer does not know.
        replaced: fields that would have taken ids from the answer or given it an id.
        unknown: fields that the engine's table does not have.
        seeded: a training request has a seed of its own.
    """

    body: Mapping[str, Any]
    recorded: bool = True
    capped: bool = False
    choices: int = 1
    sampling: Mapping[str, Any] = field(default_factory=dict)
    overridden: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    deviating: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    unenforced: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    seeded: bool = False

    def for_model(self, model: str) -> Outgoing:
        """The same with a server's own name of the model."""
        return replace(self, body={**self.body, "model": model})

    def json(self) -> list[bytes | memoryview]:
        """The body in pieces."""
        return encoded(self.body)

    def json_without_cap(self) -> list[bytes | memoryview]:
        return encoded({name: value for name, value in self.body.items() if name != "max_tokens"})


def read_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request's body, large values as ``LargeValue``.

    Raises:
        BadRequestError: it is none.
    """
    try:
        return read_object(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not a JSON object: {error}") from None


def recordable(
    body: Mapping[str, Any], endpoint: Endpoint, phase: Phase, engine: Engine, *, trainable: bool
) -> Outgoing:
    """The request with what recording and training need (``Engine.FIELDS``).

    Raises:
        BadRequestError: it would be trained on, and has content or a field that rows cannot hold.
    """
    trains = phase.trains(trainable=trainable)
    if _echoes(body, endpoint, engine) and (not trains or _samples_nothing(body, engine)):
        # Beside token ids there is no text of the prompt, which is what the agent wants.
        return Outgoing(body, recorded=False)
    if trains:
        _refuse(body, endpoint, engine)
    changed, replaced = engine.for_recording(body, endpoint)
    overridden: dict[str, tuple[Any, Any]] = {}
    deviating: dict[str, tuple[Any, Any]] = {}
    unenforced: list[str] = []
    if phase.sampling is not None and trainable:
        different = deviations(body, phase.sampling, engine)
        if trains:
            unenforced = _named(body, endpoint, "form", engine)
        if phase.enforces(trainable=trainable):
            overridden = different
            changed = {name: value for name, value in changed.items() if name not in engine.NEUTRAL}
            changed.update(engine.sampling_parameters(phase.sampling))
            if engine.has_strict_tools(body):
                changed["tools"] = engine.loosened(body["tools"])
                overridden[STRICT_TOOLS] = (True, False)
        else:
            if trains:
                deviating = different
                unenforced += [STRICT_TOOLS] if engine.has_strict_tools(body) else []
            for name, ours in engine.sampling_parameters(phase.sampling).items():
                if changed.get(name) is None:
                    changed[name] = ours
    cap = _missing_limit(body, endpoint, phase)
    if cap is not None:
        changed["max_tokens"] = cap
    return Outgoing(
        body=changed,
        capped=cap is not None,
        choices=_choices(body, endpoint, engine),
        sampling=sampling_of(changed, endpoint, engine),
        overridden=overridden,
        deviating=deviating,
        unenforced=unenforced,
        replaced=replaced,
        unknown=[name for name in body if name not in engine.FIELDS[endpoint]] if trains else [],
        seeded=trains and body.get("seed") is not None,
    )


def _refuse(body: Mapping[str, Any], endpoint: Endpoint, engine: Engine) -> None:
    """The trainer would compute log-probs of another context or distribution."""
    name = media_of(body.get("messages"), engine.MEDIA_REFERENCE) if endpoint == CHAT else None
    if name is not None:
        raise BadRequestError(
            f"a message has a part of type {name!r}: training rows hold text only; send text, or "
            f"{_UNTRAINED}"
        )
    for name in _named(body, endpoint, "refused", engine):
        because = engine.FIELDS[endpoint][name].because
        raise BadRequestError(f"{name} in a call that is trained: {because}; or {_UNTRAINED}")


def _named(
    body: Mapping[str, Any], endpoint: Endpoint, treatment: Treatment, engine: Engine
) -> list[str]:
    """Names of the body's fields with this treatment whose values have an effect."""
    return [
        name
        for name, field in engine.FIELDS[endpoint].items()
        if field.treatment == treatment and engine.has_effect(field, body.get(name))
    ]


def _echoes(body: Mapping[str, Any], endpoint: Endpoint, engine: Engine) -> bool:
    return endpoint == COMPLETIONS and engine.is_on(body.get("echo"))


def _samples_nothing(body: Mapping[str, Any], engine: Engine) -> bool:
    return engine.number(body.get("max_tokens")) == 0


def _missing_limit(body: Mapping[str, Any], endpoint: Endpoint, phase: Phase) -> int | None:
    # The completions endpoint has a default of its own.
    if phase.sampling is None or endpoint != CHAT:
        return None
    if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
        return phase.sampling.max_tokens
    return None


def _choices(body: Mapping[str, Any], endpoint: Endpoint, engine: Engine) -> int:
    n = engine.number(body.get("n"))
    per_prompt = 1 if n is None else n
    return per_prompt * (_prompts(body.get("prompt")) if endpoint == COMPLETIONS else 1)


def _prompts(prompt: Any) -> int:
    """A list of numbers is one prompt."""
    if isinstance(prompt, LargeValue):
        first = next(iter(elements_of(prompt)), None)
        return prompt.count() if isinstance(first, str | list | LargeValue) else 1
    many = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    return len(prompt) if many else 1
