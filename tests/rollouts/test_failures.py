"""Why rollouts failed: from the runner to the store, and in words."""

from __future__ import annotations

import asyncio
import os
import re
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("agentlightning", reason="needs the extra [cpu] or [verl]")

# Without it litellm looks for a price list on the internet when it is imported, and waits.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import numpy as np

import agl_fast
from agl_fast.rollouts import FinishedRollout
from agl_fast.rollouts.rollout_metrics import Failures
from agl_fast.rows.rewards import read_reward
from agl_fast.verl.agentlightning_patches import METADATA_KEY, patch_agentlightning, summarize
from support.daemon_runs import agentlightning

pytestmark = pytest.mark.filterwarnings("ignore")  # of agentlightning and what it imports


def run_agent(returns: Any) -> tuple[str, list[float | None], str | None]:
    """With Agent-lightning's runner: the rollout's status, its rewards, and why it failed."""
    patch_agentlightning()

    class Agent(agentlightning.LitAgent[Any]):
        async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> Any:
            return returns() if callable(returns) else returns

    async def run() -> tuple[str, list[float | None], str | None]:
        store = agentlightning.InMemoryLightningStore()
        await store.add_resources({})
        runner = agentlightning.LitAgentRunner(tracer=agentlightning.OtelTracer())
        # `step` raises what the agent raised.
        with suppress(Exception), runner.run_context(agent=Agent(), store=store):
            await runner.step({"question": 1}, mode="train")
        (rollout,) = await store.query_rollouts()
        (attempt,) = await store.query_attempts(rollout.rollout_id)
        spans = await store.query_spans(rollout.rollout_id)
        rewards = [agentlightning.emitter.get_reward_value(span) for span in spans]
        why = (attempt.metadata or {}).get(METADATA_KEY)
        return attempt.status, [each for each in rewards if each is not None], why

    return asyncio.run(run())


def emit(value: Any) -> Any:
    def emitting() -> None:
        agentlightning.emit_reward(value)

    return emitting


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), np.array(0.5), 0.5])
def test_a_real_number_that_an_agent_returns_is_its_reward(value: Any) -> None:
    assert run_agent(value) == ("succeeded", [0.5], None)


@pytest.mark.parametrize("value", [None, float("nan"), np.float32("nan")])
def test_a_reward_that_is_missing_fails_nothing(value: Any) -> None:
    assert run_agent(value) == ("succeeded", [], None)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("good", "TypeError: rollout '.*': the reward that its agent returned must be a real numb"),
        (1j, "TypeError: rollout '.*must be a real number .* or None, got 1j"),
        (float("inf"), "ValueError: rollout '.*returned is inf; rewards must be finite"),
        (lambda: {}["key"], "KeyError: 'key'"),
    ],
)
def test_why_a_rollout_failed(value: Any, why: str) -> None:
    status, rewards, told = run_agent(value)
    assert (status, rewards) == ("failed", [])
    assert told is not None
    assert re.search(why, told)


def test_an_emitted_number_of_numpy_is_a_reward() -> None:
    status, rewards, _ = run_agent(emit(np.float32(0.25)))
    assert (status, rewards) == ("succeeded", [0.25])
    for wrong, why in (("good", "TypeError: the emitted reward must be"), (np.nan, "emit none")):
        status, _, told = run_agent(emit(wrong))
        assert status == "failed"
        assert why in str(told)


class HttpError(Exception):
    status_code = 404


def outcome(
    name: str, *, status: str = "succeeded", calls: int = 1, error: str | None = None
) -> Any:
    made = [agl_fast.Call([1], [2])] * calls
    return FinishedRollout(name, "g", made, 1.0, status, {}, error=error)


def test_failures_in_words() -> None:
    failures = Failures()
    assert failures.add([outcome("a")]) is None
    assert failures.sentence() is None
    step = [
        outcome("b", status="failed", error=summarize(HttpError("no model x\nfurther"))),
        outcome("c", status="failed", error=summarize(HttpError("no model y"))),
        outcome("d", status="deadline"),
        outcome("e", calls=0),
    ]
    assert failures.add(step) == (
        "3 of 4 rollouts failed, 2 of them with HttpError (HTTP 404): no model x; 1 succeeded "
        "without a recorded call (the first is 'e'): did the agent call another address than the "
        "resource main_llm's?"
    )
    assert failures.add([outcome("f", status="timeout")]) == (
        "1 of 1 rollouts failed, all took longer than agentlightning.llm_timeout_seconds"
    )
    assert str(failures.sentence()).startswith("4 of 6 rollouts failed, 2 of them with HttpError")


@pytest.mark.parametrize("value", [True, 1, 1.0, np.float32(1), np.int8(1), np.bool_(True)])
def test_real_numbers_are_rewards(value: Any) -> None:
    assert read_reward(value, "here") == 1.0


def test_other_real_numbers_are_rewards() -> None:
    from decimal import Decimal
    from fractions import Fraction

    import torch

    assert read_reward(Fraction(1, 4), "here") == read_reward(Decimal("0.25"), "here") == 0.25
    assert read_reward(torch.tensor(0.25, requires_grad=True), "here") == 0.25
    assert read_reward(torch.tensor(0.25, dtype=torch.bfloat16), "here") == 0.25
    for missing in (None, float("nan"), np.float32("nan"), Decimal("NaN"), torch.tensor(np.nan)):
        assert read_reward(missing, "here") is None
    for wrong in ("1", b"1", 1j, np.array([1.0]), torch.ones(1), [1.0], np.complex64(1)):
        with pytest.raises(TypeError, match=r"^rollout 'r': reward must be a real number"):
            read_reward(wrong, "rollout 'r': reward")
    for infinite in (float("-inf"), 1e39, 10**400, Decimal("1e999"), np.float64("inf")):
        with pytest.raises(ValueError, match="rewards must be finite"):
            read_reward(infinite, "here")
