"""Token traces of real agents: native == reference."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import agl_fast
from agl_fast import reference
from support.batch_lists import as_lists, assert_same
from support.plain_rollouts import to_native
from support.token_traces import CONTAINERS, TRACES, held, trace

WIDTHS = [
    pytest.param(512, 512, id="P512-R512"),
    pytest.param(4096, 2048, id="P4096-R2048"),
    pytest.param(8192, 16384, id="P8192-R16384"),
]


@cache
def expected(name: str, level: str, p: int, r: int) -> reference.Batch:
    return reference.build_batch(trace(name), **options(level, p, r))


def options(level: str, p: int, r: int) -> dict[str, Any]:
    return {
        "level": level,
        "max_prompt_length": p,
        "max_response_length": r,
        "pad_token_id": 151_643,
        "call_index": True,
        "layout": "jagged",
    }


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize(("p", "r"), WIDTHS)
@pytest.mark.parametrize("level", ["trajectory", "transition"])
@pytest.mark.parametrize("name", TRACES)
def test_native_is_the_reference(name: str, level: str, p: int, r: int, container: str) -> None:
    rollouts = [to_native(one, held(one, container)) for one in trace(name)]
    batch = agl_fast.build_batch(rollouts, **options(level, p, r))
    assert_same(as_lists(batch), expected(name, level, p, r))


@pytest.mark.parametrize("name", TRACES)
def test_padded(name: str) -> None:
    chosen = options("trajectory", 4096, 2048) | {"layout": "padded", "trim": True}
    batch = agl_fast.build_batch([to_native(one) for one in trace(name)], **chosen)
    assert_same(as_lists(batch), reference.build_batch(trace(name), **chosen))


def test_plain_chat_merges_and_stripped_reasoning_splits() -> None:
    """What the traces are for, at widths that cut nothing."""
    rows = {
        name: len(expected(name, "trajectory", 8192, 16384).columns["data_id_list"])
        for name in TRACES
    }
    n_calls = {name: sum(len(one.calls) for one in trace(name)) for name in TRACES}
    assert rows["swe_plain"] < 2 * len(trace("swe_plain"))
    assert rows["swe_nothink"] == n_calls["swe_nothink"]
    assert rows["swe_plain"] < rows["swe_think"] < n_calls["swe_think"]
