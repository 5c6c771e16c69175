"""parse_token_ids: native == reference, on valid and broken text, and both agree with json."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import agl_fast
from agl_fast import reference

MAX_ID = 2**31 - 1
IDS = st.lists(st.integers(0, MAX_ID) | st.integers(0, 99), max_size=40)
SPACE = st.text(" \t\n\r", max_size=3)


@st.composite
def spaced_arrays(draw: Any) -> tuple[list[int], str]:
    ids = draw(IDS)
    items = [draw(SPACE) + str(token) + draw(SPACE) for token in ids]
    inside = ",".join(items) if items else draw(SPACE)
    return ids, draw(SPACE) + "[" + inside + "]" + draw(SPACE)


@st.composite
def damaged_arrays(draw: Any) -> str:
    """A valid array with one edit, or any text made of the characters that matter."""
    if draw(st.booleans()):
        return draw(st.text("[], 0123456789.-+eE\n\0é", max_size=14))
    _, text = draw(spaced_arrays())
    at = draw(st.integers(0, len(text)))
    removed = draw(st.integers(0, 2))
    inserted = draw(st.text('[],. \f-+e019"té\0', max_size=2))
    return text[:at] + inserted + text[at + removed :]


def outcome(parse: Any, text: str | bytes) -> list[int] | str:
    """The ids, or the position that the error names."""
    try:
        return [int(token) for token in parse(text)]
    except ValueError as error:
        message = str(error)
    position = re.search(r"position \d+", message)
    assert position is not None, message
    return position.group()


def as_json(text: str) -> list[int] | None:
    """What the json module reads, None where that is no array of ids."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if type(value) is not list or any(type(token) is not int for token in value):
        return None
    return value if all(0 <= token <= MAX_ID for token in value) else None


@pytest.mark.parametrize("parse", [agl_fast.parse_token_ids, reference.parse_token_ids])
@given(spaced_arrays(), st.booleans())
def test_reads_what_json_reads(parse: Any, array: tuple[list[int], str], as_bytes: bool) -> None:
    ids, text = array
    assert outcome(parse, text.encode() if as_bytes else text) == ids
    assert json.loads(text) == ids


@given(damaged_arrays())
@example("")
@example("[")
@example("[]]")
@example("[1,]")
@example("[,1]")
@example("[1 2]")
@example("[01]")
@example("[1.0]")
@example("[1e3]")
@example("[-1]")
@example("[+1]")
@example("[true]")
@example('["1"]')
@example("[[1]]")
@example("[2147483647]")
@example("[2147483648]")
@example("[99999999999999999999999999]")
@example("1")
@example("null")
@example("[1] x")
@example("[1\0]")
@example("\ufeff[1]")
@example("[\u0661]")
def test_native_refuses_what_the_reference_refuses(text: str) -> None:
    expected = outcome(reference.parse_token_ids, text.encode())
    assert outcome(agl_fast.parse_token_ids, text.encode()) == expected
    assert outcome(agl_fast.parse_token_ids, text) == expected


@given(damaged_arrays())
def test_the_reference_accepts_what_json_accepts(text: str) -> None:
    result = outcome(reference.parse_token_ids, text)
    # JSON has a minus zero; a token id has no sign.
    assert (None if isinstance(result, str) else result) == (
        None if "-0" in text else as_json(text)
    )


def test_gives_an_int32_array_of_its_own() -> None:
    ids = agl_fast.parse_token_ids("[1, 2, 3]")
    assert isinstance(ids, np.ndarray)
    assert (ids.dtype, ids.shape) == (np.int32, (3,))
    assert ids.flags.writeable
    empty = agl_fast.parse_token_ids("[]")
    assert (empty.dtype, empty.shape) == (np.int32, (0,))


@pytest.mark.parametrize("length", [1, 8_192, 100_000])
def test_long_arrays(length: int) -> None:
    ids = np.random.default_rng(length).integers(0, 2**31, length).tolist()
    assert agl_fast.parse_token_ids(json.dumps(ids)).tolist() == ids
    assert agl_fast.parse_token_ids(json.dumps(ids, separators=(",", ":")).encode()).tolist() == ids


@pytest.mark.parametrize("value", [None, 5, [1, 2]])
def test_takes_text_only(value: Any) -> None:
    with pytest.raises(TypeError):
        agl_fast.parse_token_ids(value)
