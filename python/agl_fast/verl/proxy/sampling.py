"""How a run samples, and what of an agent's request differs from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

PhaseName: TypeAlias = Literal["train", "val"]


@dataclass(frozen=True)
class SamplingPolicy:
    """How the rollouts of a phase are sampled.

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

    def parameters(self) -> dict[str, float]:
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}


@dataclass(frozen=True)
class Phase:
    """What the calls that start now belong to."""

    name: PhaseName = "val"
    policy_version: int | None = None
    sampling: SamplingPolicy | None = None

    def enforces(self, *, trainable: bool) -> bool:
        return (
            self.name == "train"
            and trainable
            and self.sampling is not None
            and self.sampling.enforce
        )


# They change what is sampled, the trainer knows nothing of them: counted, and left as they are.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "structured_outputs": (),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),  # others make vLLM mask what is no call
}
# What a call keeps of its request.
_KEPT = ("temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "seed", *_NEUTRAL)


def deviations(body: Mapping[str, Any], policy: SamplingPolicy) -> dict[str, tuple[Any, float]]:
    """What the body asks for, and the run's value, by parameter."""
    return {
        name: (body[name], ours)
        for name, ours in policy.parameters().items()
        if body.get(name) is not None and not _same(name, body[name], ours)
    }


def unenforceable(body: Mapping[str, Any]) -> list[str]:
    """Names of parameters that bend the distribution in ways the trainer does not know."""
    return [
        name
        for name, neutral in _NEUTRAL.items()
        if body.get(name) is not None and body[name] not in neutral
    ]


def has_strict_tools(body: Mapping[str, Any]) -> bool:
    """Whether vLLM masks whatever is no call of them, which the trainer knows nothing of."""
    tools = body.get("tools")
    return isinstance(tools, list) and any(_is_strict(tool) for tool in tools)


def loosened(tools: list[Any]) -> list[Any]:
    """The tools, none of them strict."""
    return [
        {**tool, "function": {**tool["function"], "strict": False}} if _is_strict(tool) else tool
        for tool in tools
    ]


def _is_strict(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and function.get("strict") is True


def sampling_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters that a request states."""
    return {name: body[name] for name in _KEPT if body.get(name) is not None}


def _same(name: str, theirs: Any, ours: float) -> bool:
    if name == "top_k" and ours <= 0:
        return bool(theirs in (-1, 0))
    return bool(theirs == ours)
