"""How a batch is built, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from agl_fast.ops.argument_checks import INT32_MAX, INT64_MAX, INT64_MIN, integer
from agl_fast.rows.call_rewards import read_reward

Level = Literal["transition", "trajectory", "tree"]
OverlongPrompt = Literal["drop", "spill"]
TruncatedRollouts = Literal["train", "mask", "zero_reward"]
Layout = Literal["padded", "jagged"]

TREE_MAX_TOKENS = 16384


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
    tree_max_tokens: int = TREE_MAX_TOKENS
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
        integer("max_prompt_length", self.max_prompt_length, 1, INT32_MAX)
        integer("max_response_length", self.max_response_length, 1, INT32_MAX)
        if self.max_total_length is not None:
            integer("max_total_length", self.max_total_length, 1, INT32_MAX)
        integer("tree_max_tokens", self.tree_max_tokens, 1, INT32_MAX)
        integer("pad_token_id", self.pad_token_id, INT64_MIN, INT64_MAX)
        if read_reward(self.reward_fillna_value, "reward_fillna_value") is None:
            error = TypeError if self.reward_fillna_value is None else ValueError
            raise error(f"reward_fillna_value must be finite, got {self.reward_fillna_value!r}")
        for name in ("trim", "call_index"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.tokenizer is not None and not callable(getattr(self.tokenizer, "decode", None)):
            raise TypeError(f"tokenizer must have a decode method, got {self.tokenizer!r}")

    @property
    def drops_overlong(self) -> bool:
        default = "drop" if self.level == "transition" else "spill"
        return (self.overlong_prompt or default) == "drop"


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
