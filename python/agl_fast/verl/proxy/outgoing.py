"""An agent's request as a vLLM server gets it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from agl_fast.verl.proxy.sampling import (
    Phase,
    deviations,
    has_strict_tools,
    loosened,
    sampling_of,
    unenforceable,
)

Endpoint: TypeAlias = Literal["/v1/chat/completions", "/v1/completions"]


# Of OpenAI's and vLLM's content parts: image_url, input_audio, video_url, …
_MEDIA = ("image", "audio", "video")


class BadRequestError(ValueError):
    """The agent's request cannot be understood; the message is for the agent."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What goes to the server.

    Attributes:
        body: the JSON object.
        capped: ``max_tokens`` is ours.
        choices: how many the answer will have.
        sampling: what the request states after our changes.
        overridden: the agent's value and the run's, by parameter, where the run's went out.
        deviating: the same where the agent's went out.
        unenforced: parameters that change what is sampled and that the trainer does not know.
        seeded: a training request has a seed of its own.
    """

    body: Mapping[str, Any]
    capped: bool
    choices: int
    sampling: Mapping[str, Any]
    overridden: Mapping[str, tuple[Any, float]]
    deviating: Mapping[str, tuple[Any, float]]
    unenforced: list[str]
    seeded: bool

    def json(self) -> bytes:
        return _dumps(self.body)

    def json_without_cap(self) -> bytes:
        return _dumps({name: value for name, value in self.body.items() if name != "max_tokens"})


def read_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request's body.

    Raises:
        BadRequestError: it is none.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequestError(f"the body must be a JSON object, got {type(body).__name__}")
    return body


def recordable(
    body: Mapping[str, Any], endpoint: Endpoint, phase: Phase, *, trainable: bool
) -> Outgoing:
    """The request with what recording and training need; everything else is untouched.

    Raises:
        BadRequestError: it would be trained on, and has content that rows cannot hold.
    """
    if phase.name == "train" and trainable:
        _refuse_media(body)
    changed = {**body, "return_token_ids": True}
    if endpoint == "/v1/chat/completions":
        changed["logprobs"] = True
        # An explicit null would switch log-probs off.
        if changed.get("top_logprobs") is None:
            changed["top_logprobs"] = 0
    elif changed.get("logprobs") is None:
        changed["logprobs"] = 0
    overridden: dict[str, tuple[Any, float]] = {}
    deviating: dict[str, tuple[Any, float]] = {}
    unenforced: list[str] = []
    if phase.sampling is not None and trainable:
        different = deviations(body, phase.sampling)
        if phase.enforces(trainable=trainable):
            overridden, unenforced = different, unenforceable(body)
            changed.update(phase.sampling.parameters())
            if has_strict_tools(body):
                changed["tools"] = loosened(body["tools"])
                overridden["tools.function.strict"] = (True, False)
        else:
            if phase.name == "train":
                deviating = different
            for name, ours in phase.sampling.parameters().items():
                if changed.get(name) is None:
                    changed[name] = ours
    cap = _missing_limit(body, endpoint, phase)
    if cap is not None:
        changed["max_tokens"] = cap
    return Outgoing(
        body=changed,
        capped=cap is not None,
        choices=_choices(body, endpoint),
        sampling=sampling_of(changed),
        overridden=overridden,
        deviating=deviating,
        unenforced=unenforced,
        seeded=phase.name == "train" and trainable and body.get("seed") is not None,
    )


def _refuse_media(body: Mapping[str, Any]) -> None:
    """The trainer would compute log-probs without the images, and nobody would notice."""
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else []:
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and any(word in kind for word in _MEDIA):
                raise BadRequestError(
                    f"a message has a part of type {kind!r}: training rows hold text only; send "
                    "text, or the header X-AGL-Train: 0 for a call that is not trained"
                )


def _missing_limit(body: Mapping[str, Any], endpoint: Endpoint, phase: Phase) -> int | None:
    # The completions endpoint has a default of its own.
    if phase.sampling is None or endpoint != "/v1/chat/completions":
        return None
    if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
        return phase.sampling.max_tokens
    return None


def _choices(body: Mapping[str, Any], endpoint: Endpoint) -> int:
    n = body.get("n")
    per_prompt = n if isinstance(n, int) else 1
    prompts = body.get("prompt")
    # A list of numbers is one prompt.
    many = endpoint == "/v1/completions" and isinstance(prompts, list)
    if many and prompts and isinstance(prompts[0], str | list):
        return per_prompt * len(prompts)
    return per_prompt


def _dumps(body: Mapping[str, Any]) -> bytes:
    # ASCII, as lone surrogates cannot be encoded otherwise.
    return json.dumps(body, separators=(",", ":")).encode()
