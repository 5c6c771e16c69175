"""How a batch is built, checked once."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, Literal, get_args

Level = Literal["transition", "trajectory"]
OverlongPrompt = Literal["drop", "spill"]
TruncatedRollouts = Literal["train", "mask", "zero_reward"]
Layout = Literal["padded", "jagged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The keyword arguments of ``build_batch``, documented there."""

    level: Level = "trajectory"
    max_prompt_length: int
    max_response_length: int
    max_total_length: int | None = None
    pad_token_id: int
    overlong_prompt: OverlongPrompt | None = None
    truncated_rollouts: TruncatedRollouts = "train"
    reward_fillna_value: float = 0.0
    trim: bool = False
    layout: Layout = "padded"
    call_index: bool = False
    tokenizer: Any = None

    def __post_init__(self) -> None:
        _one_of("level", self.level, get_args(Level))
        _one_of("layout", self.layout, get_args(Layout))
        _one_of("truncated_rollouts", self.truncated_rollouts, get_args(TruncatedRollouts))
        if self.overlong_prompt is not None:
            _one_of("overlong_prompt", self.overlong_prompt, get_args(OverlongPrompt))
        _limit("max_prompt_length", self.max_prompt_length)
        _limit("max_response_length", self.max_response_length)
        if self.max_total_length is not None:
            _limit("max_total_length", self.max_total_length)
        require_int("pad_token_id", self.pad_token_id)
        _finite("reward_fillna_value", self.reward_fillna_value)
        if self.tokenizer is not None and not callable(getattr(self.tokenizer, "decode", None)):
            raise TypeError(f"tokenizer must have a decode method, got {self.tokenizer!r}")

    @property
    def drops_overlong(self) -> bool:
        default = "drop" if self.level == "transition" else "spill"
        return (self.overlong_prompt or default) == "drop"


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")


def require_int(name: str, value: object) -> int:
    """The value as int; a TypeError that names it if it is none."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, got {value!r}")
    return operator.index(value)


def _limit(name: str, value: object) -> None:
    if require_int(name, value) < 1:
        raise ValueError(f"{name} must be at least 1, got {value!r}")


def _finite(name: str, value: object) -> None:
    if not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a float, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value!r}")
