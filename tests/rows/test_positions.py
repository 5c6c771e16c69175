"""Positions in several dimensions: from calls to tensors, merged rows, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import agl_fast
from agl_fast import reference
from support.batch_lists import as_lists, assert_same
from support.plain_rollouts import rollout, to_native

OPTIONS: dict[str, Any] = {"max_prompt_length": 4, "max_response_length": 8, "pad_token_id": 0}

# An image of two tokens after one of text, as M-RoPE numbers it, in D = 2 dimensions.
IMAGE = [[0, 1, 2, 3, 4, 5], [0, 1, 1, 2, 3, 4]]


def first(n_tokens: int) -> dict[str, Any]:
    return {"position_ids": [dimension[:n_tokens] for dimension in IMAGE]}


TWO_TURNS = [([1, 2, 3], [4], first(4)), ([1, 2, 3, 4, 5], [6], first(6))]


def test_a_merged_row_has_the_positions_of_its_last_call(build: Any) -> None:
    batch = build([rollout(*TWO_TURNS)], **OPTIONS)
    (row,) = batch.tensors["position_ids"]
    assert row == [[0, *dimension, *[dimension[-1]] * 5] for dimension in IMAGE]
    assert batch.mismatches == []
    jagged = build([rollout(*TWO_TURNS)], layout="jagged", **OPTIONS)
    assert jagged.tensors["position_ids"] == [IMAGE]


def test_level_transition_keeps_the_positions_of_each_call(build: Any) -> None:
    batch = build([rollout(*TWO_TURNS)], level="transition", layout="jagged", **OPTIONS)
    assert batch.tensors["position_ids"][0] == first(4)["position_ids"]
    # The second prompt is longer than P: its row keeps the first four tokens, then the response.
    assert batch.tensors["position_ids"][1] == [[0, 1, 2, 3, 5], [0, 1, 1, 2, 4]]


def test_tokens_beyond_the_limits_take_their_positions_along(build: Any) -> None:
    spilled = build(
        [rollout(*TWO_TURNS)], **(OPTIONS | {"max_prompt_length": 2, "max_response_length": 2})
    )
    assert spilled.tensors["position_ids"] == [[dimension[:4] for dimension in IMAGE]]


@pytest.mark.parametrize(("changed", "index"), [(IMAGE[::-1], 2), ([[0] * 6] * 2, 1)])
def test_other_positions_of_the_same_tokens_are_a_mismatch(
    build: Any, changed: Any, index: int
) -> None:
    calls = [TWO_TURNS[0], (*TWO_TURNS[1][:2], {"position_ids": changed})]
    batch = build([rollout(*calls)], layout="jagged", **OPTIONS)
    assert len(batch.tensors["prompts"]) == 2
    assert [(each.call, each.index, each.kind) for each in batch.mismatches] == [
        (1, index, "positions_changed")
    ]
    assert batch.tensors["position_ids"] == [first(4)["position_ids"], changed]


def test_a_call_extends_the_chain_whose_positions_it_has(build: Any) -> None:
    """Two answers that are equal but for their positions; the third call continues the first."""
    others = {"position_ids": [[9] * 4] * 2}
    calls = [TWO_TURNS[0], ([1, 2, 3], [4], others), TWO_TURNS[1]]
    batch = build([rollout(*calls)], layout="jagged", call_index=True, **OPTIONS)
    assert batch.tensors["call_index"] == [[0, -1, 2], [1]]
    assert batch.tensors["position_ids"] == [IMAGE, [[9] * 4] * 2]


@pytest.mark.parametrize("with_positions", [0, 1])
def test_a_call_without_positions_counts_by_one(build: Any, with_positions: int) -> None:
    calls = [([1, 2], [3]), ([1, 2, 3, 4], [5])]
    prompt, response = calls[with_positions]
    counted = [[*range(len(prompt) + 1)]] * 3
    calls[with_positions] = (prompt, response, {"position_ids": counted})
    batch = build([rollout(*calls)], **(OPTIONS | {"max_response_length": 3}))
    assert batch.tensors["position_ids"] == [[[0, 0, 0, 1, 2, 3, 4]] * 3]


def test_daemon_log_finds_the_call_that_was_not_extended() -> None:
    from agl_fast.rows.mismatches import cause_of, closest_call

    calls = [TWO_TURNS[0], (*TWO_TURNS[1][:2], {"position_ids": IMAGE[::-1]})]
    native = to_native(rollout(*calls))
    (mismatch,) = agl_fast.build_batch([native], **OPTIONS).mismatches
    assert closest_call(mismatch, native.calls, np.array([1, 2, 3, 4, 5]))[0] == 0
    assert cause_of(mismatch, native.calls, None) == "positions_changed"
    assert (
        agl_fast.build_batch([native], **OPTIONS).metrics["training/mismatches/positions_changed"]
        == 1
    )


@pytest.mark.parametrize("level", ["transition", "trajectory"])
def test_jagged_is_what_verl_makes_of_the_padded_batch(level: Any) -> None:
    from verl.workers.utils.padding import left_right_2_no_padding

    rollouts = [to_native(rollout(*TWO_TURNS)), to_native(rollout(([7], [8, 9]), rollout_id="r1"))]
    padded = agl_fast.build_batch(rollouts, level=level, **OPTIONS)
    jagged = agl_fast.build_batch(rollouts, level=level, layout="jagged", **OPTIONS)
    tensors = {name: tensor.clone() for name, tensor in padded.tensors.items()}
    expected = left_right_2_no_padding(TensorDict(tensors, len(padded)))["position_ids"]
    found = jagged.tensors["position_ids"]
    assert found.shape[:2] == expected.shape[:2]
    assert torch.equal(found.values(), expected.values())
    assert torch.equal(found.offsets(), expected.offsets())


@pytest.mark.parametrize(
    "container",
    [
        pytest.param(lambda ids: np.array(ids, np.int32), id="int32"),
        pytest.param(lambda ids: np.asfortranarray(ids), id="fortran_order"),
        pytest.param(lambda ids: np.repeat(np.array(ids), 2, axis=1)[:, ::2], id="strided"),
        pytest.param(lambda ids: torch.tensor(ids), id="tensor"),
        pytest.param(lambda ids: torch.tensor(ids).T.contiguous().T, id="strided_tensor"),
    ],
)
def test_containers(container: Any) -> None:
    native = to_native(rollout(*TWO_TURNS))
    for call in native.calls:
        call.position_ids = container(call.position_ids.tolist())
    expected = reference.build_batch([rollout(*TWO_TURNS)], **OPTIONS)
    assert_same(as_lists(agl_fast.build_batch([native], **OPTIONS)), expected)


@pytest.mark.parametrize(
    ("given", "error", "named"),
    [
        pytest.param(
            [[0, 1, 2]], TypeError, ["int64", "(dimensions, 3)", "[[0, 1, 2]]"], id="list"
        ),
        pytest.param(np.array([[0.0, 1, 2]]), TypeError, ["float64"], id="float"),
        pytest.param(np.array([[0, 1, 2]], np.int16), TypeError, ["int16"], id="int16"),
        pytest.param(np.arange(3), ValueError, ["(dimensions, 3)", "(3,)"], id="one_dimensional"),
        pytest.param(np.arange(4)[None], ValueError, ["(dimensions, 3)", "(1, 4)"], id="too_long"),
        pytest.param(np.empty((0, 3), int), ValueError, ["(0, 3)"], id="no_dimension"),
        pytest.param(
            np.array([[0, 1, 2], [0, -7, 1]]), ValueError, ["[1, 1]", "-7"], id="negative"
        ),
        pytest.param(torch.tensor([[0, 1, 2**31]]), ValueError, ["[0, 2]", str(2**31)], id="large"),
        pytest.param(
            np.arange(9).reshape(3, 3), ValueError, ["3 dimensions", "2"], id="other_dims"
        ),
    ],
)
def test_what_is_wrong_is_named_and_leaves_nothing_behind(
    given: Any, error: Any, named: list[str]
) -> None:
    builder = agl_fast.BatchBuilder(**OPTIONS)
    builder.add(to_native(rollout(*TWO_TURNS)))
    bad = agl_fast.Call([1, 2], [3], position_ids=given)
    with pytest.raises(error, match=r"rollout 'bad', call 1: position_ids") as raised:
        builder.add(agl_fast.Rollout("bad", "d0", [agl_fast.Call([1], [2]), bad]))
    for part in named:
        assert part in str(raised.value)
    assert len(builder) == 1
    batch = builder.finish()
    assert batch.tensors["position_ids"].shape == (1, 2, 12)


def test_the_dimensions_of_a_batch_end_with_it() -> None:
    builder = agl_fast.BatchBuilder(**OPTIONS)
    for n_dims in (4, 3):
        builder.add(
            agl_fast.Rollout(
                "r0", "d0", [agl_fast.Call([1], [2], position_ids=np.zeros((n_dims, 2), int))]
            )
        )
        assert builder.finish().tensors["position_ids"].shape == (1, n_dims, 12)
    builder.add(agl_fast.Rollout("r0", "d0", [agl_fast.Call([1], [2])]))
    assert builder.finish().tensors["position_ids"].shape == (1, 12)


def test_level_tree_refuses_positions() -> None:
    builder = agl_fast.BatchBuilder(level="tree", **OPTIONS)
    with pytest.raises(ValueError, match=r"'r0', call 0: position_ids: level tree"):
        builder.add(to_native(rollout(*TWO_TURNS)))
    with pytest.raises(ValueError, match=r"'r0', call 0: position_ids: level tree"):
        builder.add_call("r0", None, 0, [1], [2], position_ids=np.zeros((2, 2), int))
    assert len(builder) == 0
