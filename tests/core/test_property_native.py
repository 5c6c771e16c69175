"""Native code == plain Python, on random rollouts, in every container, by every way in."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import agl_fast
from agl_fast import reference
from support.batch_lists import as_lists, assert_same, assert_same_outcome
from support.plain_rollouts import Containers, PlainCall, PlainRollout, to_native
from support.simulated_agents import (
    CHAINS,
    containers,
    options,
    rollouts_in_containers,
    several_rollouts,
)


@given(several_rollouts(), options())
def test_from_lists(rollouts: list[PlainRollout], chosen: dict[str, Any]) -> None:
    native = [to_native(one) for one in rollouts]
    assert_same_outcome(lambda: agl_fast.build_batch(native, **chosen), rollouts, chosen)


@given(several_rollouts(positions=True), options(CHAINS))
def test_positions(rollouts: list[PlainRollout], chosen: dict[str, Any]) -> None:
    native = [to_native(one) for one in rollouts]
    assert_same_outcome(lambda: agl_fast.build_batch(native, **chosen), rollouts, chosen)


@given(rollouts_in_containers(), options())
def test_from_any_container(
    pairs: list[tuple[PlainRollout, Containers]], chosen: dict[str, Any]
) -> None:
    native = [to_native(plain, held) for plain, held in pairs]
    assert_same_outcome(
        lambda: agl_fast.build_batch(native, **chosen), [plain for plain, _ in pairs], chosen
    )


@given(rollouts_in_containers(), options())
def test_builder_copies_what_it_needs(
    pairs: list[tuple[PlainRollout, Containers]], chosen: dict[str, Any]
) -> None:
    """Each rollout is gone before the next one comes, as in a loop over finished rollouts."""

    def build() -> Any:
        builder = agl_fast.BatchBuilder(**chosen)
        for plain, held in pairs:
            builder.add(to_native(plain, held))
        return builder.finish()

    assert_same_outcome(build, [plain for plain, _ in pairs], chosen)


@given(st.lists(several_rollouts(), min_size=2, max_size=4), options())
def test_reused_buffers_hold_nothing_of_the_batch_before(
    batches: list[list[PlainRollout]], chosen: dict[str, Any]
) -> None:
    builder = agl_fast.BatchBuilder(**chosen, reuse_buffers=True)

    def build() -> Any:
        for one in rollouts:
            builder.add(to_native(one))
        return builder.finish()

    for rollouts in batches:
        assert_same_outcome(build, rollouts, chosen)


@given(st.data(), several_rollouts(), options(), st.sampled_from([61, 150, 257]))
def test_long_sequences(
    data: st.DataObject, rollouts: list[PlainRollout], chosen: dict[str, Any], factor: int
) -> None:
    """Every token stands ``factor`` times, so that tokens are compared and filled in blocks."""
    for rollout in rollouts:
        for call in rollout.calls:
            call.prompt_ids = _repeated(call.prompt_ids, factor)
            call.response_ids = _repeated(call.response_ids, factor)
            call.log_probs = call.log_probs and _repeated(call.log_probs, factor)
    for limit in ("max_prompt_length", "max_response_length", "max_total_length"):
        chosen[limit] = chosen[limit] and chosen[limit] * factor - data.draw(st.integers(0, 3))
    native = [to_native(one, data.draw(containers(one))) for one in rollouts]
    assert_same_outcome(lambda: agl_fast.build_batch(native, **chosen), rollouts, chosen)


def _repeated(values: list[Any], factor: int) -> list[Any]:
    return [value for value in values for _ in range(factor)]


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [PlainCall([7] * (400 + i), [5] * 300, [-0.5] * 300) for i in range(60)]
    rollouts = [PlainRollout([call], rollout_id=f"r{i}") for i, call in enumerate(calls)]
    chosen = {"max_prompt_length": 600, "max_response_length": 700, "pad_token_id": 9}
    for layout in ("padded", "jagged"):
        for threads in ("1", "2", "7"):
            monkeypatch.setenv("AGL_NUM_THREADS", threads)
            native = [to_native(one) for one in rollouts]
            batch = agl_fast.build_batch(native, layout=layout, **chosen)
            assert_same(as_lists(batch), reference.build_batch(rollouts, layout=layout, **chosen))
