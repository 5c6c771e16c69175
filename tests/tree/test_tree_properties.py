"""What must hold of every batch of trees, whichever implementation built it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given

from agl_fast.rows.accounting import EmptyBatchError
from support.implementations import BUILDS
from support.plain_rollouts import PlainRollout
from support.simulated_agents import options, several_rollouts
from support.tree_rows import NO_PARENT, TreeRow, laid_out, oracle_size, tree_rows

both = pytest.mark.parametrize("implementation", ["reference", "native"])
trees = options(["tree"], layout="jagged", call_index=True)
whole = options(["tree"], layout="jagged", call_index=True, tree_max_tokens=16384)


def rows_of(implementation: str, rollouts: list[PlainRollout], chosen: Any) -> list[TreeRow]:
    try:
        return tree_rows(BUILDS[implementation](rollouts, **chosen))
    except EmptyBatchError:
        return []


@both
@given(several_rollouts(), trees)
def test_every_path_spells_its_call(
    implementation: str, rollouts: list[PlainRollout], chosen: dict[str, Any]
) -> None:
    """Every sampled token stands in its exact context, once, with its own log-prob."""
    by_id = {rollout.rollout_id: dict(laid_out(rollout)) for rollout in rollouts}
    trained = set()
    for row in rows_of(implementation, rollouts, chosen):
        for index, indices in row.sampled().items():
            call = by_id[row.rollout_id][index]
            assert row.tokens_to(indices[-1]) == call.context
            assert row.path(indices[-1])[len(call.prompt_ids) :] == indices
            if call.log_probs is not None and row.log_probs is not None:
                known = [row.log_probs[at] for at in indices]
                assert known == pytest.approx(call.log_probs, rel=1e-6, abs=1e-37)
            assert (row.rollout_id, index) not in trained
            trained.add((row.rollout_id, index))
    assert trained == {
        (rollout_id, index)
        for rollout_id, kept in by_id.items()
        for index, call in kept.items()
        if len(call.context) <= chosen["tree_max_tokens"]
    }


@both
@given(several_rollouts(), trees)
def test_rows_are_well_formed(
    implementation: str, rollouts: list[PlainRollout], chosen: dict[str, Any]
) -> None:
    rewards = {}
    for row in rows_of(implementation, rollouts, chosen):
        assert row.depth[0] == 0
        assert [row.depth[at] - 1 for at in range(len(row.ids)) if row.depth[at]] == [
            row.depth[parent] for parent in row.parent if parent != NO_PARENT
        ]
        assert row.mask == [int(call != -1) for call in row.call]
        # A root token is never trained: there is no position that its log-prob could be read at.
        assert not any(
            mask for mask, parent in zip(row.mask, row.parent, strict=True) if parent == NO_PARENT
        )
        assert row.mask.index(1) == row.n_prompt
        assert row.mask[-1] == 1
        assert not any(row.scores[:-1])
        assert rewards.setdefault(row.rollout_id, row.scores[-1]) == row.scores[-1]
        # Nothing stands in a row that no trained token has seen.
        seen = {at for own in row.sampled().values() for at in row.path(own[-1])}
        assert seen == set(range(len(row.ids)))
        # What a call sampled lies side by side.
        for indices in row.sampled().values():
            assert all(after == before + 1 for before, after in pairwise(indices))


@both
@given(several_rollouts(), whole)
def test_sizes_equal_a_trie(
    implementation: str, rollouts: list[PlainRollout], chosen: dict[str, Any]
) -> None:
    sizes = {row.rollout_id: len(row.ids) for row in rows_of(implementation, rollouts, chosen)}
    expected = {
        rollout.rollout_id: oracle_size([call for _, call in laid_out(rollout)])
        for rollout in rollouts
    }
    assert sizes == {rollout_id: size for rollout_id, size in expected.items() if size}


@both
@given(several_rollouts(), trees)
def test_a_row_of_a_split_rollout_is_a_part_of_the_whole_row(
    implementation: str, rollouts: list[PlainRollout], chosen: dict[str, Any]
) -> None:
    """The nodes on its calls' paths, in the same order, at the same depth; no row is too long."""
    most = chosen["tree_max_tokens"]
    parts = rows_of(implementation, rollouts, chosen)
    whole_rows = rows_of(implementation, rollouts, chosen | {"tree_max_tokens": 16384})
    for row in parts:
        assert len(row.ids) <= most
    for row in whole_rows:
        own = [part for part in parts if part.rollout_id == row.rollout_id]
        sampled = row.sampled()
        fitting = [call for call, at in sampled.items() if len(row.path(at[-1])) <= most]
        assert [call for part in own for call in part.sampled()] == fitting
        for part in own:
            nodes = sorted({at for call in part.sampled() for at in row.path(sampled[call][-1])})
            assert part.ids == [row.ids[at] for at in nodes]
            assert part.depth == [row.depth[at] for at in nodes]
            assert part.call == [
                row.call[at] if row.call[at] in part.sampled() else -1 for at in nodes
            ]


@both
@given(several_rollouts(), trees)
def test_no_other_cut_has_fewer_tokens(
    implementation: str, rollouts: list[PlainRollout], chosen: dict[str, Any]
) -> None:
    """Nor as many in fewer rows: every way to cut the calls, depth first, is tried."""
    most = chosen["tree_max_tokens"]
    parts = rows_of(implementation, rollouts, chosen)
    for row in rows_of(implementation, rollouts, chosen | {"tree_max_tokens": 16384}):
        paths = [set(row.path(at[-1])) for at in row.sampled().values()]
        paths = [path for path in paths if len(path) <= most]
        sizes = [len(part.ids) for part in parts if part.rollout_id == row.rollout_id]
        found = (sum(sizes), len(sizes))
        assert found == (min(all_ways(paths, most)) if paths else (0, 0))


def all_ways(paths: list[set[int]], most: int) -> Iterator[tuple[int, int]]:
    """(tokens, rows) of every way to cut the paths into rows that are short enough."""
    for cuts in product([False, True], repeat=len(paths) - 1):
        sizes = []
        row = paths[0]
        for cut, path in zip(cuts, paths[1:], strict=True):
            if cut:
                sizes.append(len(row))
            row = path if cut else row | path
        sizes.append(len(row))
        if max(sizes) <= most:
            yield sum(sizes), len(sizes)


@both
@given(several_rollouts(), whole)
def test_a_single_chain_is_the_same_row_at_level_trajectory(
    implementation: str, rollouts: list[PlainRollout], chosen: dict[str, Any]
) -> None:
    no_limit = {"max_prompt_length": 999, "max_response_length": 999, "max_total_length": None}
    chains = rows_of(implementation, rollouts, chosen | no_limit | {"level": "trajectory"})
    row_of = {row.rollout_id: row for row in rows_of(implementation, rollouts, chosen)}
    assert {row.rollout_id for row in chains} == row_of.keys()
    for rollout_id, tree in row_of.items():
        own = [row for row in chains if row.rollout_id == rollout_id]
        assert len(tree.ids) <= sum(len(row.ids) for row in own)
        if len(own) == 1:
            assert tree == own[0]


@both
@given(several_rollouts(), trees)
def test_widths_and_limits_of_the_other_levels_change_nothing(
    implementation: str, rollouts: list[PlainRollout], chosen: dict[str, Any]
) -> None:
    others = {
        "max_prompt_length": 1,
        "max_response_length": 1,
        "max_total_length": 1,
        "overlong_prompt": "drop",
        "truncated_rollouts": "mask",
        "trim": not chosen["trim"],
    }
    assert rows_of(implementation, rollouts, chosen) == rows_of(
        implementation, rollouts, chosen | others
    )
