"""The results of a run, for its report."""

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
    """Rows and tokens of forward passes without limits."""

    rows: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Played:
    """A validation rollout."""

    sample: dict[str, Any]
    calls: Sequence[agl_fast.Call]
    reward: float


@dataclass
class RunLog:
    """Written by the trainer and daemon of `training.reporting_to`.

    Attributes:
        say: prints a line for the user.
        rewards: mean reward of each training step.
        validations: mean reward of each validation, by the number of steps before it.
        played: rollouts of each validation, by the number of steps before it.
        forwarded: over all training steps, by the level at which the calls could be trained.
        left_out: training rollouts that failed or made no call. Recordings contain them.
        seconds: duration of the run's stages, in order.
        update_seconds: duration of the first step's update by level; empty if not measured.
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
        """Count the time since the end of the previous stage for `name`."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._stage_began
        self._stage_began = now

    def sampled(
        self, rollouts: Sequence[agl_fast.Rollout], reward: float, *, left_out: int = 0
    ) -> None:
        """Add a training step: its rollouts, mean reward, and number of rollouts left out."""
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
        """Add a validation."""
        self.validations[step] = reward
        self.say(f"  validation after {step} steps: reward {reward:.3f}")


def forwarded(rollouts: Sequence[agl_fast.Rollout], level: LevelName) -> tuple[int, int]:
    """Count the rows and tokens of a forward pass over the rollouts, as `analyze` does."""
    # Imported here, as --help needs no torch.
    from agl_fast.rows.options import Limits
    from agl_fast.tools.analyze.layouts import lay_out

    layout = lay_out(rollouts, level, Limits()).layout
    return layout.rows, layout.tokens
