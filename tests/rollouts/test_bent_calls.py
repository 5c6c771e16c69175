"""Rows name the calls whose sampling an agent changed, so that the audit keeps them apart."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu]")

import support.verl_trainer_imports  # noqa: F401
from agl_fast import Call, Rollout
from agl_fast.proxy.sampling import SamplingPolicy
from agl_fast.rollouts.training_rows import TrainingRows
from agl_fast.training.credit import CreditAssignment

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl and what it imports

RUN = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
FORCED = {"tool_choice": "required"}
JSON = {"response_format": {"type": "json_object"}}


def column(*samplings: Any, **policy: Any) -> list[Any] | None:
    """Of one rollout a call each, which the next one extends; then one with a plain call."""
    rows = TrainingRows(
        {"level": "trajectory"},
        "skip",
        credit=CreditAssignment(),
        tokenizer=None,
        policy=SamplingPolicy(**{**RUN, **policy}),
        pad_token_id=0,
    )
    calls = [
        Call(list(range(2 * i + 1)), [2 * i + 1], sampling=each) for i, each in enumerate(samplings)
    ]
    for name, of_rollout in (("a", calls), ("b", [Call([1], [2], sampling=RUN)])):
        rows.add(Rollout(name, "g", of_rollout, 1.0))
    found = rows.build(16, 16, "cpu").columns.get("bent_calls_list")
    return None if found is None else list(found)


def test_no_call_is_bent():
    assert column(RUN, {**RUN, "top_k": 0, "max_tokens": 8, "seed": 1}, None) is None


def test_a_bent_call_is_named_with_its_index():
    assert column(RUN, {**RUN, **FORCED}, {**RUN, **JSON, "min_p": 0.1}) == [
        {1: ("tool_choice",), 2: ("min_p", "response_format")},
        {},
    ]


def test_other_parameters_than_the_runs_are_bent_as_well():
    """With agentlightning.sampling=allow, where they reach the server."""
    assert column({**RUN, "temperature": 0.2}, {**RUN, "top_p": 0.9}) == [
        {0: ("temperature",), 1: ("top_p",)},
        {},
    ]
    assert column({**RUN, "top_p": 0.9}, top_p=0.9) == [{}, {0: ("top_p",)}]
