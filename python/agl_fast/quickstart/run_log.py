"""What a run of the quickstart remembers for its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import agl_fast
from agl_fast.rows.levels import LEVELS, LevelName

BAR_WIDTH = 20


@dataclass
class Forwarded:
    """What the trainer's forward passes take in where nothing is cut by limits."""

    rows: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Played:
    """A rollout of a validation."""

    sample: dict[str, Any]
    calls: Sequence[agl_fast.Call]
    reward: float


@dataclass
class RunLog:
    """Filled in by the trainer and daemon of `reporting.reporting_to`.

    Attributes:
        say: prints a line for the user.
        rewards: mean reward of each training step.
        validations: mean reward by the number of steps taken before.
        played: the rollouts of each validation, likewise.
        forwarded: by level, over all training steps and from the same calls.
        left_out: rollouts of training steps that failed or made no call; they are recorded, too.
        seconds: by stage of the run, in order.
        update_seconds: of the first step's update, by level; empty where it was not measured.
    """

    say: Callable[[str], None]
    steps: int
    rewards: list[float] = field(default_factory=list)
    validations: dict[int, float] = field(default_factory=dict)
    played: dict[int, list[Played]] = field(default_factory=dict)
    forwarded: dict[LevelName, Forwarded] = field(
        default_factory=lambda: {level: Forwarded() for level in LEVELS}
    )
    left_out: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    update_seconds: dict[LevelName, float] = field(default_factory=dict)
    _stage_began: float = field(default_factory=time.monotonic)

    def stage_ended(self, name: str) -> None:
        """What took place since the last stage ended was `name`."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._stage_began
        self._stage_began = now

    def sampled(
        self, rollouts: Sequence[agl_fast.Rollout], reward: float, *, left_out: int = 0
    ) -> None:
        """Take the rollouts of a training step, and how many it left out."""
        self.left_out += left_out
        for level in LEVELS:
            rows, tokens = forwarded(rollouts, level)
            self.forwarded[level].rows += rows
            self.forwarded[level].tokens += tokens
        self.rewards.append(reward)
        done = len(self.rewards)
        bar = "#" * round(BAR_WIDTH * done / self.steps)
        self.say(f"  [{bar:.<{BAR_WIDTH}}] step {done}/{self.steps}, training reward {reward:.3f}")

    def validated(self, step: int, reward: float) -> None:
        """Take the result of a validation."""
        self.validations[step] = reward
        self.say(f"  validation after {step} steps: reward {reward:.3f}")


def forwarded(rollouts: Sequence[agl_fast.Rollout], level: LevelName) -> tuple[int, int]:
    """Rows and tokens that a forward pass over the rollouts takes in, as `analyze` counts them."""
    # Only now: --help needs no torch.
    from agl_fast.rows.options import Limits
    from agl_fast.tools.analyze.layouts import lay_out

    layout = lay_out(rollouts, level, Limits()).layout
    return layout.rows, layout.tokens


def rows_of(rollouts: Sequence[agl_fast.Rollout], level: LevelName) -> agl_fast.Batch:
    """Their rows with nothing cut off, jagged."""
    widest = 1 + max(
        len(call.prompt_ids) + len(call.response_ids) for each in rollouts for call in each.calls
    )
    return agl_fast.build_batch(
        rollouts,
        level=level,
        layout="jagged",
        max_prompt_length=widest,
        max_response_length=widest,
        pad_token_id=0,
    )
