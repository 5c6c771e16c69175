"""Samples of any kind become columns for the daemon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel

from agl_fast.training.datasets import Samples, columns_of, repeated


@dataclass
class Plain:
    question: str
    answer: int


class Model(BaseModel):
    question: str
    answer: int


class Named(NamedTuple):
    question: str
    answer: int


FIELDS: dict[str, Any] = {"question": "2 + 2", "answer": 4}


@pytest.mark.parametrize("sample", [FIELDS, Plain(**FIELDS), Model(**FIELDS), Named(**FIELDS)])
def test_a_sample_is_its_fields(sample):
    samples = Samples([sample, sample])
    assert len(samples) == 2
    assert samples[1] == FIELDS


def test_another_kind_of_sample_is_named():
    with pytest.raises(TypeError, match="sample 0 of the dataset is a str: expected a mapping"):
        Samples(["2 + 2"])[0]


def test_columns_keep_nested_and_ragged_values_and_fill_gaps():
    columns = columns_of([{"a": [1, 2], "b": {"x": 1}}, {"a": [3], "c": None}])
    assert {name: column.tolist() for name, column in columns.items()} == {
        "a": [[1, 2], [3]],
        "b": [{"x": 1}, None],
        "c": [None, None],
    }


def test_equally_long_values_stay_one_value_a_sample():
    columns = columns_of([{"a": [1, 2]}, {"a": [3, 4]}])
    assert columns["a"].shape == (2,)
    assert repeated(columns, 2)["a"].tolist() == [[1, 2], [1, 2], [3, 4], [3, 4]]
