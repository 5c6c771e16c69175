"""How a run samples, and what of an agent's request differs from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from agl_fast.proxy.fields import CHAT, EXPLICIT, FIELDS, NEUTRAL, RUN, Endpoint, has_effect
from agl_fast.proxy.large_json import decoded, elements_of, members_of
from agl_fast.proxy.request_values import is_on, unquoted

PhaseName: TypeAlias = Literal["train", "val"]


@dataclass(frozen=True)
class SamplingPolicy:
    """How the rollouts of a phase are sampled.

    Every other sampling parameter has its neutral value (``fields.EXPLICIT``), whatever the
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

    def parameters(self) -> dict[str, Any]:
        """The sampling parameters that every call carries, by vLLM's name."""
        return {**{name: getattr(self, name) for name in RUN}, **EXPLICIT}


@dataclass(frozen=True)
class Phase:
    """What the calls that start now belong to."""

    name: PhaseName = "val"
    policy_version: int | None = None
    sampling: SamplingPolicy | None = None

    def trains(self, *, trainable: bool) -> bool:
        """Whether a call is trained on."""
        return self.name == "train" and trainable

    def enforces(self, *, trainable: bool) -> bool:
        return (
            self.trains(trainable=trainable) and self.sampling is not None and self.sampling.enforce
        )


STRICT_TOOLS = "tools.function.strict"
# Further fields that a recorded call keeps.
_LIMITS = ("max_tokens", "max_completion_tokens", "seed")


def deviations(body: Mapping[str, Any], policy: SamplingPolicy) -> dict[str, tuple[Any, Any]]:
    """What the body asks for, and the run's value, by parameter."""
    return {
        name: (body[name], ours)
        for name, ours in {**NEUTRAL, **policy.parameters()}.items()
        if body.get(name) is not None and not _same(name, body[name], ours)
    }


def bent_by(sampling: Mapping[str, Any]) -> list[str]:
    """Names of parameters with which a recorded call was sampled from another distribution than
    temperature, top_p and top_k make.

    Args:
        sampling: of an ``agl_fast.Call``.
    """
    table = FIELDS[CHAT]
    names = [
        name
        for name, value in sampling.items()
        if name in table
        and table[name].treatment in ("neutral", "form")
        and has_effect(table[name], value)
    ]
    return [*names, STRICT_TOOLS] if sampling.get(STRICT_TOOLS) else names


def has_strict_tools(body: Mapping[str, Any]) -> bool:
    """Whether vLLM forbids all that is no call of them, which the trainer knows nothing of."""
    return any(_is_strict(tool) for tool in elements_of(body.get("tools")))


def loosened(tools: Any) -> list[Any]:
    """The tools, none of them strict."""
    return [_loosened(tool) if _is_strict(tool) else tool for tool in elements_of(tools)]


def _loosened(tool: Any) -> dict[str, Any]:
    members = members_of(tool) or {}
    return {**members, "function": {**(members_of(members["function"]) or {}), "strict": False}}


def _is_strict(tool: Any) -> bool:
    function = members_of((members_of(tool) or {}).get("function"))
    return function is not None and is_on(function.get("strict"))


def sampling_of(body: Mapping[str, Any], endpoint: Endpoint) -> dict[str, Any]:
    """The sampling parameters of a request, without those at their neutral value."""
    kept = {name: decoded(body[name]) for name in (*RUN, *_LIMITS) if body.get(name) is not None}
    for name, field in FIELDS[endpoint].items():
        if field.treatment in ("neutral", "form") and has_effect(field, body.get(name)):
            kept[name] = decoded(body[name])
    if has_strict_tools(body):
        kept[STRICT_TOOLS] = True
    return kept


def _same(name: str, theirs: Any, ours: Any) -> bool:
    if isinstance(ours, bool):
        return is_on(theirs) == ours
    theirs = unquoted(theirs)
    if name == "top_k" and ours <= 0:
        return bool(theirs in (-1, 0))
    return bool(theirs == ours)
