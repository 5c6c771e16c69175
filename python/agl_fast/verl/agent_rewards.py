"""Rewards that agents return or emit, on their way to the store."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

import agentlightning.emitter.reward  # noqa: F401, whose name in the package is a function
from agentlightning.runner.agent import LitAgentRunner

from agl_fast.rows.rewards import read_reward


def take_real_numbers_as_rewards() -> None:
    """Let agents return and emit every real number that `Rollout.reward` takes.

    Runner processes are forked and inherit this; twice does no harm.
    """
    _take_what_agents_return()
    _take_what_agents_emit()


def _take_what_agents_return() -> None:
    """Monkeypatch ``LitAgentRunner._post_process_rollout_result`` of agentlightning 0.3.0.

    It takes float, int and bool alone, so that a rollout fails whose agent returns a number of
    numpy or torch; and it takes infinity, which is no reward. Obsolete with a release
    of agentlightning that takes real numbers.
    """
    process = LitAgentRunner._post_process_rollout_result
    if hasattr(process, "__wrapped__"):
        return

    @functools.wraps(process)
    async def process_with_number(self: Any, rollout: Any, raw_result: Any) -> Any:
        if not isinstance(raw_result, list):
            where = f"rollout {rollout.rollout_id!r}: the reward that its agent returned"
            raw_result = read_reward(raw_result, where)  # None where it is NaN
        return await process(self, rollout, raw_result)

    LitAgentRunner._post_process_rollout_result = process_with_number


def _take_what_agents_emit() -> None:
    """Monkeypatch ``emit_reward`` of agentlightning 0.3.0, wherever its modules name it.

    Why, and until when, as for what agents return.
    """
    emit = sys.modules["agentlightning.emitter.reward"].emit_reward
    if hasattr(emit, "__wrapped__"):
        return

    @functools.wraps(emit)
    def emit_number(reward: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(reward, Mapping):
            reward = {name: as_number(each, f"reward {name!r}") for name, each in reward.items()}
        else:
            reward = as_number(reward, "the emitted reward")
        return emit(reward, *arguments, **options)

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "agentlightning" and vars(module).get("emit_reward") is emit:
            setattr(module, "emit_reward", emit_number)  # noqa: B010


def as_number(value: Any, where: str) -> float:
    """The reward as Python's float.

    Raises:
        TypeError: it is no real number. ValueError: it is not finite in float32.
    """
    number = read_reward(value, where)
    if number is None:
        raise ValueError(f"{where} is {value!r}; rewards must be finite: emit none instead")
    return number
