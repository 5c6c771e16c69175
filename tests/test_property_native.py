"""Native code == plain Python, on random rollouts, in every container, by every way in."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import agl_fast
from batch_lists import assert_same_outcome
from plain_rollouts import Containers, PlainRollout, to_native
from simulated_agents import options, rollouts_in_containers, several_rollouts


@given(several_rollouts(), options())
def test_from_lists(rollouts: list[PlainRollout], chosen: dict[str, Any]) -> None:
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
