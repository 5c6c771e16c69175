"""Values of requests in odd types are read as vLLM's request classes read them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_fast.proxy.engines.vllm import is_on, number, unquoted

pydantic = pytest.importorskip("pydantic", reason="needs the extra [cpu]")
INTEGER = pydantic.TypeAdapter(int)
SWITCH = pydantic.TypeAdapter(bool)
ODD = [
    *(0, 1, 2, -1, 10**30, 0.0, 1.0, 2.0, -0.0, 2.5, 1e15, 1e300, float("nan"), float("inf")),
    *(True, False, None, "", "0", "1", "2", "-1", "+2", "2.0", "2.00", "2.5", "2.", ".0", "2e0"),
    *(" 2 ", "1_0", "0x2", "02", "\u0662", "two", "nan", "true", "True", "TRUE", "t", "T", "yes"),
    *("y", "on", "On", "false", "no", "n", "off", "f", " true", "ja", [], [1], {}, {"a": 1}),
]


def read_by(adapter: Any, value: Any) -> Any:
    """What pydantic makes of the value; None: it refuses it, and vLLM answers 400."""
    try:
        return adapter.validate_python(value)
    except pydantic.ValidationError:
        return None


STRINGS = st.from_regex(r" ?[+-]?[0-9]{0,4}(\.[0-9]{0,3})?([eE][+-]?[0-9])? ?", fullmatch=True)


@given(st.sampled_from(ODD) | STRINGS | st.floats() | st.integers())
def test_numbers(value: Any) -> None:
    expected = read_by(INTEGER, value)
    if expected is not None:
        assert number(value) == expected


@pytest.mark.parametrize("value", ODD)
def test_switches(value: Any) -> None:
    expected = read_by(SWITCH, value)
    if expected is not None:
        assert is_on(value) == expected


@given(st.sampled_from(ODD) | STRINGS)
def test_numbers_in_quotes(value: Any) -> None:
    expected = read_by(pydantic.TypeAdapter(float), value)
    if expected is not None and isinstance(value, str):
        assert repr(unquoted(value)) == repr(expected)


def test_what_is_no_number_is_none() -> None:
    for value in ("two", "", "2.5", 2.5, [], {}, None, float("nan"), float("inf")):
        assert number(value) is None
