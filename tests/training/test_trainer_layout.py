"""Mini-batches of whole rollouts, laid out for any number of ranks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from agl_fast import Accounting, RolloutEntry
from agl_fast.training.minibatches import (
    PADDING,
    MiniBatches,
    count_mini_batches,
    lay_out,
    whole_rollouts,
    zero_advantage_groups,
)
from agl_fast.training.step_rows import Rows

rows_per_rollout = st.lists(st.integers(1, 7), min_size=1, max_size=40)


def rollout_of_row(n_rows: list[int]) -> list[str]:
    return [f"rollout {i}" for i, n in enumerate(n_rows) for _ in range(n)]


@given(
    n_rows=rows_per_rollout,
    n_mini_batches=st.integers(1, 6),
    n_ranks=st.integers(1, 5),
    multiple=st.integers(1, 4),
    seed=st.none() | st.integers(0, 99),
    data=st.data(),
)
def test_every_row_stands_once_and_every_rank_has_as_many(
    n_rows, n_mini_batches, n_ranks, multiple, seed, data
):
    owners = rollout_of_row(n_rows)
    lengths = data.draw(st.lists(st.integers(2, 500), min_size=len(owners), max_size=len(owners)))
    mini_batches = whole_rollouts(owners, n_mini_batches, seed=seed)
    layout = lay_out(mini_batches, lengths, n_ranks=n_ranks, multiple=multiple)

    rows = layout.order[layout.order != PADDING]
    assert sorted(rows.tolist()) == list(range(len(owners)))
    assert layout.n_padding_rows == len(layout.order) - len(owners)
    assert layout.n_mini_batches == min(n_mini_batches, len(n_rows))
    assert len(layout.order) == layout.mini_batch_size * layout.n_mini_batches
    assert layout.mini_batch_size % (n_ranks * multiple) == 0

    homes = {
        owners[row]: number
        for number, mini_batch in enumerate(layout.by_mini_batch())
        for row in mini_batch
    }
    for number, mini_batch in enumerate(layout.by_mini_batch()):
        assert {homes[owners[row]] for row in mini_batch} == {number}
    per_mini_batch = Counter(homes.values())
    assert max(per_mini_batch.values()) - min(per_mini_batch.values()) <= 1
    # No wider than the fullest mini-batch needs.
    fullest = max(len(mini_batch) for mini_batch in mini_batches)
    assert layout.mini_batch_size < fullest + n_ranks * multiple


@given(n_rows=rows_per_rollout, size=st.integers(1, 50))
def test_optimiser_steps_follow_from_rollouts_alone(n_rows, size):
    one_row_each = [1] * len(n_rows)
    n_mini_batches = count_mini_batches(len(n_rows), size)
    assert n_mini_batches == int(np.ceil(len(n_rows) / size))
    for shape in (n_rows, one_row_each):
        mini_batches = whole_rollouts(rollout_of_row(shape), n_mini_batches)
        layout = lay_out(mini_batches, [9] * sum(shape), n_ranks=2)
        assert layout.n_mini_batches == n_mini_batches
        owners = rollout_of_row(shape)
        assert all(len({owners[row] for row in rows}) <= size for rows in layout.by_mini_batch())


def test_full_mini_batches_take_rollouts_in_order():
    owners = rollout_of_row([2, 1, 1, 3, 1, 1])
    mini_batches = whole_rollouts(owners, count_mini_batches(6, 2))
    assert [rows.tolist() for rows in mini_batches] == [[0, 1, 2], [3, 4, 5, 6], [7, 8]]


def test_shuffling_deals_rollouts_out_differently_for_each_seed():
    owners = rollout_of_row([1] * 64)
    first, again, other = (whole_rollouts(owners, 2, seed=seed)[0] for seed in (1, 1, 2))
    assert first.tolist() == again.tolist() != other.tolist()
    assert sorted(first) != list(range(32))


def test_ranks_get_nearly_as_many_tokens():
    lengths = [1000, 10, 10, 990, 500, 510, 20, 30]
    layout = lay_out([np.arange(8)], lengths, n_ranks=2)
    shares = [sum(lengths[row] for row in rows) for rows in layout.order.reshape(2, -1)]
    assert abs(shares[0] - shares[1]) <= 50


def test_the_workers_order_is_rank_mini_batch_row():
    layout = lay_out([np.array([0, 1]), np.array([2])], [5, 5, 5], n_ranks=2)
    assert layout.order.tolist() == [0, 2, 1, PADDING]
    assert layout.mini_batch_size == 2


def test_the_order_of_rows_decides_nothing_where_that_of_rollouts_is_given():
    owners = ["c", "a", "b", "a", "c"]
    mini_batches = whole_rollouts(owners, 2, order=["a", "rowless", "b", "c"])
    assert [sorted(rows.tolist()) for rows in mini_batches] == [[1, 2, 3], [0, 4]]
    assert [rows.tolist() for rows in whole_rollouts(owners, 2, order=["b"])] == [[2]]


PART = {"data_loader_seed": 42, "shuffle": False, "use_dynamic_bsz": True}
# Groups 0 to 3 of three rollouts each, rollout i with i % 2 + 1 rows; groups 1 and 3 learn nothing.
GROUPED = [number for number in range(12) for _ in range(number % 2 + 1)]


def entry(number: int) -> RolloutEntry:
    n_rows = number % 2 + 1
    group = f"group {number // 3}"
    return RolloutEntry(
        f"rollout {number}", group, 0.0, True, n_rows, n_rows, Accounting(), False, None
    )


def split(limit: int | None, n_rollouts: int = 12) -> tuple[MiniBatches, set[str]]:
    trained = torch.ones(len(GROUPED), 2, dtype=torch.int64)
    moves = [number // 3 in (0, 2) and number % 3 != 0 for number in GROUPED]
    tensors = {
        "responses": trained,
        "response_mask": trained,
        "attention_mask": torch.ones(len(GROUPED), 9, dtype=torch.int64),
        "advantages": torch.tensor(moves)[:, None] * trained,
    }
    columns = {
        "rollout_id_list": np.array([f"rollout {number}" for number in GROUPED], object),
        "data_id_list": np.array([f"group {number // 3}" for number in GROUPED], object),
    }
    rows = Rows(tensors, columns, [entry(number) for number in range(12)])
    config = OmegaConf.create(
        {
            "agentlightning": {"max_ppo_update_times": limit},
            "actor_rollout_ref": {
                "actor": {**PART, "ppo_mini_batch_size": 1},
                "rollout": {"n": 3},
            },
        }
    )
    return MiniBatches(rows, n_rollouts, config), zero_advantage_groups(rows)


def test_a_group_in_which_no_rollout_is_better_has_zero_advantage():
    assert split(None)[1] == {"group 1", "group 3"}


@pytest.mark.parametrize(("limit", "n_left"), [(None, 12), (4, 12), (3, 9), (2, 6), (1, 3)])
def test_rollouts_over_the_update_limit_are_left_out_whole(limit, n_left):
    of_step, zero_groups = split(limit)
    kept = of_step.apply_update_limit(zero_groups, global_step=1).tolist()
    left = {number for number, stays in zip(GROUPED, kept, strict=True) if stays}
    assert len(left) == n_left
    assert left == {number for number in GROUPED if number in left}
    groups = Counter(number // 3 for number in left)
    if n_left >= 6:  # what learns something stays
        assert groups[0] == groups[2] == 3
    else:
        assert groups[1] == groups[3] == 0

    part = OmegaConf.create({**PART, "ppo_mini_batch_size": 1})
    mini_batches, layout = of_step.split(part, 2, 1, fixed=True)
    assert layout.n_mini_batches == len(mini_batches) == min(limit or 4, 4)
    rows = sorted(row for mini_batch in mini_batches for row in mini_batch.tolist())
    assert rows == [row for row, stays in enumerate(kept) if stays]


def test_which_rollouts_are_left_out_changes_from_step_to_step():
    of_step, zero_groups = split(3)
    first, again, other = (
        of_step.apply_update_limit(zero_groups, global_step=step).tolist() for step in (1, 1, 2)
    )
    assert first == again != other


def test_rollouts_that_gave_no_rows_leave_room():
    of_step, zero_groups = split(6, n_rollouts=24)
    assert of_step.apply_update_limit(zero_groups, global_step=1).all()
