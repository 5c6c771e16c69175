"""Calls coded as differences give the same batch as whole rollouts, in any order of arrival."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import agl_fast
from support.batch_lists import assert_same_outcome
from support.plain_rollouts import PlainCall, PlainRollout, to_native
from support.simulated_agents import CHAINS, ID_CONTAINERS, options, several_rollouts

CONTAINER = st.sampled_from(sorted(ID_CONTAINERS))
OPTIONS: dict[str, Any] = {"max_prompt_length": 8, "max_response_length": 8, "pad_token_id": 0}

TAIL: dict[str, Any] = {"prompt_tail": [4], "response_ids": [5]}


@dataclass
class CodedCall:
    rollout: int
    base_call: int | None
    keep: int
    prompt_tail: Any
    response_ids: Any
    call: PlainCall


@dataclass
class WholeRollout:
    rollout: int


@st.composite
def coded(draw: Any, rollout: int, calls: list[PlainCall], index: int) -> CodedCall:
    prompt = calls[index].prompt_ids
    base_call, keep = None, 0
    if index and draw(st.integers(0, 9)):
        base_call = draw(st.integers(0, index - 1))
        context = calls[base_call].context
        shared = next(
            (i for i, (a, b) in enumerate(zip(context, prompt, strict=False)) if a != b),
            min(len(context), len(prompt)),
        )
        keep = shared if draw(st.booleans()) else draw(st.integers(0, shared))
    return CodedCall(
        rollout,
        base_call,
        keep,
        ID_CONTAINERS[draw(CONTAINER)](prompt[keep:]),
        ID_CONTAINERS[draw(CONTAINER)](calls[index].response_ids),
        calls[index],
    )


@st.composite
def arrivals(
    draw: Any, *, positions: bool = False
) -> tuple[list[PlainRollout], list[CodedCall | WholeRollout]]:
    """Rollouts in the order in which they begin, and their calls as they arrive interleaved."""
    rollouts = draw(several_rollouts(positions=positions))
    streams: list[list[CodedCall | WholeRollout]] = []
    for number, rollout in enumerate(rollouts):
        if not rollout.calls or draw(st.integers(0, 3)) == 0:
            streams.append([WholeRollout(number)])
        else:
            streams.append(
                [draw(coded(number, rollout.calls, index)) for index in range(len(rollout.calls))]
            )
    order: list[CodedCall | WholeRollout] = []
    while any(streams):
        order.append(draw(st.sampled_from([stream for stream in streams if stream])).pop(0))
    begun = list(dict.fromkeys(arrival.rollout for arrival in order))
    return [rollouts[number] for number in begun], _renumbered(order, begun)


def _renumbered(order: list[Any], begun: list[int]) -> list[Any]:
    for arrival in order:
        arrival.rollout = begun.index(arrival.rollout)
    return order


def add_coded(builder: Any, rollout_id: str, arrival: CodedCall) -> None:
    call = arrival.call
    builder.add_call(
        rollout_id,
        arrival.base_call,
        arrival.keep,
        arrival.prompt_tail,
        arrival.response_ids,
        call.log_probs,
        call.reward,
        response_id=call.response_id,
        finish_reason=call.finish_reason,
        trainable=call.trainable,
        position_ids=None if call.position_ids is None else np.array(call.position_ids, np.int64),
    )


def close(builder: Any, rollout: PlainRollout) -> None:
    builder.close_rollout(
        rollout.rollout_id, rollout.data_id, rollout.reward, status=rollout.status
    )


@given(
    st.one_of(
        st.tuples(arrivals(), options()),
        st.tuples(arrivals(positions=True), options(CHAINS)),
    ),
    st.booleans(),
)
def test_same_batch_as_whole_rollouts(
    case: tuple[tuple[list[PlainRollout], list[Any]], dict[str, Any]], close_at_once: bool
) -> None:
    (rollouts, order), chosen = case

    def build() -> Any:
        builder = agl_fast.BatchBuilder(**chosen)
        n_left = {rollout.rollout_id: len(rollout.calls) for rollout in rollouts}
        to_close = []
        for arrival in order:
            rollout = rollouts[arrival.rollout]
            if isinstance(arrival, WholeRollout):
                builder.add(to_native(rollout))
                continue
            add_coded(builder, rollout.rollout_id, arrival)
            n_left[rollout.rollout_id] -= 1
            if n_left[rollout.rollout_id] == 0:
                if close_at_once:
                    close(builder, rollout)
                else:
                    to_close.append(rollout)
        for rollout in to_close:
            close(builder, rollout)
        return builder.finish()

    assert_same_outcome(build, rollouts, chosen)


BAD_CALLS = [
    pytest.param({"prompt_tail": [1, -5]}, ["prompt_ids", "-5"], id="negative_id"),
    pytest.param({"response_ids": [1, -5]}, ["response_ids", "-5"], id="negative_response_id"),
    pytest.param({"log_probs": [float("nan")] * 2}, ["log_probs", "nan"], id="nan"),
    pytest.param({"log_probs": [-0.5]}, ["log_probs", "1", "2"], id="log_prob_missing"),
    pytest.param({"reward": float("inf")}, ["reward", "inf"], id="infinite_reward"),
    pytest.param({"base_call": 1}, ["base_call", "1"], id="base_call_is_itself"),
    pytest.param({"base_call": -1}, ["base_call", "-1"], id="base_call_negative"),
    pytest.param({"base_call": 7}, ["base_call", "7"], id="base_call_to_come"),
    pytest.param({"keep": -1}, ["keep", "-1"], id="keep_negative"),
    pytest.param({"keep": 4}, ["keep", "4", "3"], id="keep_more_than_there_is"),
    pytest.param({"base_call": None}, ["keep", "2"], id="keep_of_nothing"),
]


@pytest.mark.parametrize("level", ["trajectory", "transition"])
@pytest.mark.parametrize(("bad", "named"), BAD_CALLS)
def test_a_bad_call_changes_nothing(bad: dict[str, Any], named: list[str], level: str) -> None:
    good = {"base_call": 0, "keep": 2, "prompt_tail": [7], "response_ids": [8, 9]}

    def begin() -> Any:
        builder = agl_fast.BatchBuilder(level=level, **OPTIONS)
        builder.add_call("r0", None, 0, [1, 2], [3], [-0.5])
        return builder

    def finish(builder: Any) -> Any:
        builder.add_call("r0", **good)
        builder.close_rollout("r0", "d0", 1.0)
        return builder.finish()

    builder = begin()
    with pytest.raises(ValueError, match=r"rollout 'r0', call 1") as raised:
        builder.add_call("r0", **(good | bad))
    for part in named:
        assert part in str(raised.value)
    with_bad, without = finish(builder), finish(begin())
    for key, tensor in without.tensors.items():
        assert with_bad.tensors[key].equal(tensor), key
    assert with_bad.rollouts == without.rollouts


@pytest.mark.parametrize("field", ["base_call", "keep"])
@pytest.mark.parametrize("value", [True, 0.0, "0"])
def test_base_call_and_keep_are_ints(field: str, value: Any) -> None:
    builder = agl_fast.BatchBuilder(**OPTIONS)
    builder.add_call("r0", None, 0, [1, 2], [3])
    with pytest.raises(TypeError, match=f"'r0', call 1: {field}.*{value}"):
        builder.add_call("r0", **({"base_call": 0, "keep": 0} | {field: value}), **TAIL)
    builder.add_call("r0", 0, 3, **TAIL)
    assert builder.finish().accounting.sampled == 2


def test_a_bad_first_call_opens_no_rollout() -> None:
    builder = agl_fast.BatchBuilder(**OPTIONS)
    with pytest.raises(ValueError, match=r"rollout 'r0', call 0.*-1"):
        builder.add_call("r0", None, 0, [-1], [2])
    assert len(builder) == 0
    with pytest.raises(ValueError, match="no rollouts"):
        builder.finish()


def test_a_rollout_is_complete_once() -> None:
    builder = agl_fast.BatchBuilder(**OPTIONS)
    builder.add_call("r0", None, 0, [1], [2])
    with pytest.raises(ValueError, match="r0"):
        builder.add(agl_fast.Rollout("r0", "d0", []))
    builder.close_rollout("r0", "d0", 1.0)
    with pytest.raises(ValueError, match="r0"):
        builder.add_call("r0", 0, 2, [], [3])
    with pytest.raises(ValueError, match="r0"):
        builder.close_rollout("r0", "d0", 2.0)
    with pytest.raises(ValueError, match="r1"):
        builder.close_rollout("r1", "d0", 2.0)
    batch = builder.finish()
    assert [entry.reward for entry in batch.rollouts] == [1.0]


def test_a_bad_reward_leaves_the_rollout_open() -> None:
    builder = agl_fast.BatchBuilder(**OPTIONS)
    builder.add_call("r0", None, 0, [1], [2])
    with pytest.raises(ValueError, match=r"r0.*inf"):
        builder.close_rollout("r0", "d1", float("inf"))
    builder.close_rollout("r0", "d0", 0.5)
    assert builder.finish().rollouts[0].data_id == "d0"
