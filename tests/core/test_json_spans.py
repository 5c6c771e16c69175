"""json_members and json_runs: they read what the json module reads, and say where its parts are."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agl_fast.ops.json_spans import json_members, json_runs
from support.json_values import TEXT, VALUES

SIGNIFICANT = [
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"u", b"0", b"9", b"1e5", b"-", b"+", b"."),
    *(b"null", b"true", b"false", b"NaN", b"Infinity", b"-Infinity", b"I", b"E", b" ", b"\n"),
    *(b"\t", b"\r", b"\x0b", b"\x00", b"\x1f", b"\x7f", b"\x80", b"\xc1", b"\xc3\xa9", b"\xe0"),
    *(b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xf0\x80\x80\x80", b"\xf0\x9f\x98\x80", b"\xf4\x90\x80"),
    *(b"\xf5", b"\xff", b"\\ud800", b"\\u00e", b'\\"', b"\\x", b"//", b"'", b'"":', b'{"":0,"":1}'),
]


@st.composite
def texts(draw: Any, values: Any = VALUES) -> bytes:
    """JSON in some form, now and then with a fault."""
    text = json.dumps(
        draw(values), ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1]))
    ).encode("utf-8", "surrogatepass")
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(text)))
        inserted = draw(st.sampled_from(SIGNIFICANT) | st.just(b""))
        text = text[:at] + inserted + text[at + draw(st.integers(0, 2)) :]
    return text


def loaded(text: bytes) -> Any:
    """As json reads it; ValueError where it does not."""
    return json.loads(text.decode("utf-8", "surrogatepass"))


def members_of(text: bytes, **options: Any) -> dict[str, Any]:
    spans = json_members(text, **options).tolist()
    return {loaded(text[a:b]): loaded(text[c:d]) for a, b, c, d in spans}


@given(texts(st.dictionaries(TEXT, VALUES, max_size=4)))
@example(b"")
@example(b" { } ")
@example(b"{}x")
@example(b'{"a":1,}')
@example(b'{"a" 1}')
@example(b"{a:1}")
@example(b'{"a":01}')
@example(b'{"a":1.}')
@example(b'{"a":.5}')
@example(b'{"a":1e}')
@example(b'{"a":-}')
@example(b'{"a":+1}')
@example(b'{"a":1e400,"b":-1E-9,"c":1.50}')
@example(b'{"a":"\\ud800","b":"\xed\xb0\x80"}')
@example(b'{"a":"\xc0\x80"}')
@example(b'{"a":1,"a":2}')
@example(b'{"a":nul}')
@example(b"[]")
@example(b"\xef\xbb\xbf{}")
def test_objects_are_read_as_json_reads_them(text: bytes) -> None:
    try:
        expected = loaded(text)
    except ValueError:
        expected = None
    if not isinstance(expected, dict):
        with pytest.raises(ValueError, match=r"expected .* at position \d+, found "):
            json_members(text)
        return
    # NaN is not equal to itself.
    assert repr(members_of(text)) == repr(expected)
    padded = b'"' + text + b"]"
    assert repr(members_of(padded, begin=1, end=len(text) + 1)) == repr(expected)


@given(texts(st.lists(VALUES, max_size=8)), st.integers(1, 40))
def test_arrays_are_cut_into_whole_elements(text: bytes, run_bytes: int) -> None:
    try:
        expected = loaded(text)
    except ValueError:
        expected = None
    if not isinstance(expected, list):
        with pytest.raises(ValueError, match=r"expected .* at position \d+, found "):
            json_runs(text, 0, len(text), run_bytes)
        return
    count, runs = json_runs(text, 0, len(text), run_bytes)
    elements = [loaded(b"[" + text[begin:end] + b"]") for begin, end in runs.tolist()]
    assert repr([each for run in elements for each in run]) == repr(expected)
    assert count == len(expected)
    for (begin, end), run in zip(runs.tolist(), elements, strict=True):
        assert end - begin <= run_bytes or len(run) == 1
    for (begin, _), (_, end) in zip(runs[:-1].tolist(), runs[1:].tolist(), strict=True):
        first = json_runs(b"[" + text[begin:end] + b"]", 0, end - begin + 2, 1)[1]
        assert first[-1, 1] - first[0, 0] > run_bytes, "two runs would have fitted into one"


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity"])
def test_constants(name: str) -> None:
    text = b'{"a": [%b]}' % name.encode()
    assert repr(members_of(text)) == repr(loaded(text))
    with pytest.raises(ValueError, match="a value of JSON"):
        json_members(text, constants=False)
    with pytest.raises(ValueError, match="a value of JSON"):
        json_runs(text, 6, len(text) - 1, 8, constants=False)


@pytest.mark.parametrize("bracket", [b"[]", b"{}"])
def test_depth(bracket: bytes) -> None:
    def nested(n: int) -> bytes:
        begin, end = (b"[", b"]") if bracket == b"[]" else (b'{"a":', b"}")
        return b'{"a":' + begin * (n - 1) + b"1" + end * (n - 1) + b"}"

    assert len(json_members(nested(800))) == 1
    for n in (801, 1_000_000):
        with pytest.raises(ValueError, match="at most 800 nested values"):
            json_members(nested(n))


def test_integers_of_any_length_that_python_reads() -> None:
    assert members_of(b'{"a":-%b}' % (b"7" * 4300)) == {"a": -int("7" * 4300)}
    assert len(json_members(b'{"a":0.%b}' % (b"7" * 9000))) == 1
    with pytest.raises(ValueError, match="at most 4300 digits at position 5"):
        json_members(b'{"a":%b}' % (b"7" * 4301))


@pytest.mark.parametrize("length", range(0, 34))
def test_strings_of_every_length_end_where_they_end(length: int) -> None:
    for special in (b'"', b"\\n", b"\xc3\xa9", b"\x1f"):
        for at in range(length + 1):
            inside = b"x" * at + (b"" if special == b'"' else special) + b"x" * (length - at)
            text = b'{"a":"' + inside + b'","b":1}'
            if special == b"\x1f":
                with pytest.raises(ValueError, match=rf"at position {6 + at},"):
                    json_members(text)
            else:
                assert members_of(text) == loaded(text)


@pytest.mark.parametrize(("begin", "end"), [(-1, 2), (0, 3), (2, 1)])
def test_slices_that_are_none(begin: int, end: int) -> None:
    message = re.escape(f"begin {begin} and end {end} are no slice of 2 bytes")
    with pytest.raises(ValueError, match=message):
        json_members(b"{}", begin, end)
    with pytest.raises(ValueError, match=message):
        json_runs(b"[]", begin, end, 1)


@pytest.mark.parametrize("value", [None, "{}", bytearray(b"{}")])
def test_takes_bytes_only(value: Any) -> None:
    with pytest.raises(TypeError):
        json_members(value, 0, 0)
