"""Trees of real agents' calls: native == reference, by every way in, and what they save."""

from __future__ import annotations

import gzip
import json
from functools import cache
from typing import Any

import pytest

import agl_fast
from agl_fast import reference
from support.batch_lists import as_lists, assert_same
from support.plain_rollouts import to_native
from support.token_traces import CONTAINERS, DATA, TRACES, held, trace
from support.tree_rows import tree_rows

WHOLE = 32768
DEFAULT = 16384
SPLIT = 4096


def options(tree_max_tokens: int) -> dict[str, Any]:
    return {
        "level": "tree",
        "max_prompt_length": 512,
        "max_response_length": 512,
        "pad_token_id": 151_643,
        "call_index": True,
        "layout": "jagged",
        "tree_max_tokens": tree_max_tokens,
    }


@cache
def expected(name: str, tree_max_tokens: int) -> reference.Batch:
    return reference.build_batch(trace(name), **options(tree_max_tokens))


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("tree_max_tokens", [WHOLE, DEFAULT, SPLIT])
@pytest.mark.parametrize("name", TRACES)
def test_native_is_the_reference(name: str, tree_max_tokens: int, container: str) -> None:
    rollouts = [to_native(one, held(one, container)) for one in trace(name)]
    batch = agl_fast.build_batch(rollouts, **options(tree_max_tokens))
    assert_same(as_lists(batch), expected(name, tree_max_tokens))


@pytest.mark.parametrize("name", TRACES)
def test_calls_that_come_one_by_one(name: str) -> None:
    """As they are recorded: each a difference to the call before, rollouts interleaved."""
    builder = agl_fast.BatchBuilder(**options(DEFAULT))
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt") as lines:
        recorded = [json.loads(line) for line in lines]
    for turn in range(max(len(each["calls"]) for each in recorded)):
        for each in recorded:
            if turn < len(each["calls"]):
                builder.add_call(each["id"], turn - 1 if turn else None, *each["calls"][turn])
    for each in recorded:
        builder.close_rollout(each["id"], each["group"], each["reward"])
    assert_same(as_lists(builder.finish()), expected(name, DEFAULT))


@pytest.mark.parametrize("name", TRACES)
def test_every_call_stands_in_its_exact_context(name: str) -> None:
    calls = {rollout.rollout_id: rollout.calls for rollout in trace(name)}
    n_spelt = 0
    for row in tree_rows(expected(name, DEFAULT)):
        for index, indices in row.sampled().items():
            assert row.tokens_to(indices[-1]) == calls[row.rollout_id][index].context
            n_spelt += 1
    assert n_spelt == sum(map(len, calls.values()))


@pytest.mark.parametrize(
    ("name", "whole", "default"),
    [
        pytest.param("swe_plain", 7.1, 7.1, id="swe_plain"),
        pytest.param("swe_nothink", 6.3, 6.0, id="swe_nothink"),
        pytest.param("swe_think", 6.3, 5.9, id="swe_think"),
    ],
)
def test_tokens_saved(name: str, whole: float, default: float) -> None:
    """Tokens of one row a call over those of the trees, at least."""
    n_call_tokens = sum(len(call.context) for one in trace(name) for call in one.calls)
    for tree_max_tokens, factor in ((WHOLE, whole), (DEFAULT, default)):
        batch = expected(name, tree_max_tokens)
        assert n_call_tokens >= factor * sum(map(len, batch.tensors["input_ids"]))
        assert batch.accounting.trained == batch.accounting.sampled


@pytest.mark.parametrize("name", TRACES)
def test_one_row_a_rollout_unless_it_is_too_long(name: str) -> None:
    assert expected(name, WHOLE).columns["rollout_id_list"] == [
        rollout.rollout_id for rollout in trace(name)
    ]
    longest = max(map(len, expected(name, DEFAULT).tensors["input_ids"]))
    assert longest <= DEFAULT
