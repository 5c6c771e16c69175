"""Columns with the policy versions that sampled a row's tokens."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu]")

import support.verl_trainer_imports  # noqa: F401
from agl_fast import Call, Rollout
from agl_fast.rollouts.training_rows import TrainingRows
from agl_fast.training.credit import CreditAssignment

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl and what it imports


def columns(level: str, *versions: int | None) -> list[tuple[int, int]]:
    """Of a rollout whose calls extend each other, except the last one; then of one of version 3."""
    calls = [
        Call(list(range(2 * i + 1)), [2 * i + 1], policy_version=version)
        for i, version in enumerate(versions)
    ]
    calls[-1].prompt_ids = [50]
    rows = TrainingRows(
        {"level": level}, "skip", credit=CreditAssignment(), tokenizer=None, pad_token_id=0
    )
    rows.add(Rollout("a", "g", calls, 1.0))
    rows.add(Rollout("b", "g", [Call([1], [2], policy_version=3)], 0.0))
    found: Any = rows.build(16, 16, "cpu").columns
    return list(
        zip(
            found["policy_version_min_list"].tolist(),
            found["policy_version_max_list"].tolist(),
            strict=True,
        )
    )


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("transition", [(3, 3), (5, 5), (4, 4), (3, 3)]),
        ("trajectory", [(3, 5), (4, 4), (3, 3)]),
        ("tree", [(3, 5), (3, 3)]),
    ],
)
def test_each_row_has_the_oldest_and_the_newest_version_of_its_calls(level, expected):
    assert columns(level, 3, 5, 4) == expected


def test_one_version_in_synchronous_collection():
    assert columns("trajectory", 3, 3, 3) == [(3, 3)] * 3


def test_an_unknown_version_makes_the_row_unknown():
    assert columns("trajectory", 3, None, 4) == [(-1, -1), (4, 4), (3, 3)]
