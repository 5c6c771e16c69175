"""How a run samples, and what of an agent's request differs from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from agl_fast.proxy.engines.base import CHAT, STRICT_TOOLS, Endpoint, Engine
from agl_fast.proxy.large_json import decoded

PhaseName: TypeAlias = Literal["train", "val"]


@dataclass(frozen=True)
class SamplingPolicy:
    """How the rollouts of a phase are sampled.

    Every other sampling parameter has its neutral value (``Engine.EXPLICIT``), whatever the
    model's generation_config.json says.

    Args:
        temperature, top_p, top_k: what the run samples with; a top_k of -1 or 0 keeps every token.
        enforce: in training, they replace what an agent asks for, as the trainer computes
            log-probs with them. Otherwise they are the defaults of agents that ask for nothing.
        max_tokens: the longest answer of a chat request that names no limit; None: the server's.
    """

    temperature: float
    top_p: float
    top_k: int
    enforce: bool = True
    max_tokens: int | None = None


@dataclass(frozen=True)
class Phase:
    """What a rollout is for, and how it is sampled."""

    name: PhaseName = "val"
    sampling: SamplingPolicy | None = None

    def trains(self, *, trainable: bool) -> bool:
        """Whether a call is trained on."""
        return self.name == "train" and trainable

    def enforces(self, *, trainable: bool) -> bool:
        return (
            self.trains(trainable=trainable) and self.sampling is not None and self.sampling.enforce
        )


# Further fields that a recorded call keeps.
_LIMITS = ("max_tokens", "max_completion_tokens", "seed")


def deviations(
    body: Mapping[str, Any], policy: SamplingPolicy, engine: Engine
) -> dict[str, tuple[Any, Any]]:
    """What the body asks for, and the run's value, by parameter."""
    return {
        name: (body[name], ours)
        for name, ours in {**engine.NEUTRAL, **engine.sampling_parameters(policy)}.items()
        if body.get(name) is not None and not engine.is_same(name, body[name], ours)
    }


def bent_by(sampling: Mapping[str, Any], engine: Engine) -> list[str]:
    """Names of parameters with which a recorded call was sampled from another distribution than
    temperature, top_p and top_k make.

    Args:
        sampling: of an ``agl_fast.Call``.
    """
    table = engine.FIELDS[CHAT]
    names = [
        name
        for name, value in sampling.items()
        if name in table
        and table[name].treatment in ("neutral", "form")
        and engine.has_effect(table[name], value)
    ]
    return [*names, STRICT_TOOLS] if sampling.get(STRICT_TOOLS) else names


def sampling_of(body: Mapping[str, Any], endpoint: Endpoint, engine: Engine) -> dict[str, Any]:
    """The sampling parameters of a request, without those at their neutral value."""
    stated = [name for name in (*engine.RUN, *_LIMITS) if body.get(name) is not None]
    kept = {name: decoded(body[name]) for name in stated}
    for name, field in engine.FIELDS[endpoint].items():
        if field.treatment in ("neutral", "form") and engine.has_effect(field, body.get(name)):
            kept[name] = decoded(body[name])
    if engine.has_strict_tools(body):
        kept[STRICT_TOOLS] = True
    return kept
