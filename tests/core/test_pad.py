"""Padding: native == reference, in every container, and errors that name what is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import agl_fast
from agl_fast import reference
from support.simulated_agents import ID_CONTAINERS

IDS = st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 9), max_size=12)
PAD = st.sampled_from([0, 1, 151_643, 2**31 - 1])
WIDTH = st.none() | st.integers(0, 15)
CONTAINER = st.sampled_from(sorted(ID_CONTAINERS))
SIDES = ["left", "right"]

on_both_sides = pytest.mark.parametrize("side", SIDES)


def native(side: str) -> Any:
    return {"left": agl_fast.pad_left, "right": agl_fast.pad_right}[side]


def plain(side: str) -> Any:
    return {"left": reference.pad_left, "right": reference.pad_right}[side]


def assert_pads_like(result: Any, expected: Any) -> None:
    for tensor, values in zip(result, expected, strict=True):
        assert isinstance(tensor, torch.Tensor)
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
        assert tensor.tolist() == values


@on_both_sides
@given(st.lists(st.tuples(IDS, CONTAINER), min_size=1, max_size=6), WIDTH, PAD)
def test_batch(side: str, batch: list[tuple[list[int], str]], width: Any, pad: int) -> None:
    ids = [sequence for sequence, _ in batch]
    held = [ID_CONTAINERS[container](sequence) for sequence, container in batch]
    result = native(side)(held, width, pad)
    assert_pads_like(result, plain(side)(ids, width, pad))
    longest = max(map(len, ids))
    assert result[0].shape == (len(ids), longest if width is None else width)
    assert result[1].shape == result[0].shape


@on_both_sides
@given(IDS, CONTAINER, WIDTH, PAD)
def test_one_sequence(side: str, ids: list[int], container: str, width: Any, pad: int) -> None:
    result = native(side)(ID_CONTAINERS[container](ids), width, pad)
    assert_pads_like(result, plain(side)(ids, width, pad))
    assert result[0].shape == (len(ids) if width is None else width,)


@on_both_sides
def test_a_tuple_of_sequences_is_a_batch(side: str) -> None:
    assert_pads_like(native(side)(((1, 2), [3])), plain(side)([[1, 2], [3]]))


@on_both_sides
def test_pad_token_id_is_zero_unless_given(side: str) -> None:
    assert_pads_like(native(side)([[1], [2, 3]]), plain(side)([[1], [2, 3]], 2, 0))


def test_left_keeps_the_last_and_right_the_first() -> None:
    assert agl_fast.pad_left([1, 2, 3], 2)[0].tolist() == [2, 3]
    assert agl_fast.pad_right([1, 2, 3], 2)[0].tolist() == [1, 2]
    assert agl_fast.pad_left([1], 3, 9)[0].tolist() == [9, 9, 1]
    assert agl_fast.pad_right([1], 3, 9)[0].tolist() == [1, 9, 9]


@on_both_sides
def test_width_zero(side: str) -> None:
    ids, mask = native(side)([[1, 2], [3]], 0)
    assert ids.shape == mask.shape == (2, 0)


@on_both_sides
def test_device(side: str) -> None:
    ids, mask = native(side)([[1, 2], [3]], device="cpu")
    assert ids.device.type == mask.device.type == "cpu"


@on_both_sides
@pytest.mark.parametrize("threads", ["1", "2", "7"])
def test_threads(side: str, threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_NUM_THREADS", threads)
    ids = [list(range(index, index * 3)) for index in range(300)]
    held = [
        ID_CONTAINERS[sorted(ID_CONTAINERS)[index % len(ID_CONTAINERS)]](sequence)
        for index, sequence in enumerate(ids)
    ]
    assert_pads_like(native(side)(held, 500, 9), plain(side)(ids, 500, 9))
    ids[250][17] = -7
    with pytest.raises(ValueError, match=r"\[250\]\[17\] is -7"):
        native(side)(ids, 500, 9)


@on_both_sides
@pytest.mark.parametrize("container", [list, np.array, torch.tensor])
def test_a_bad_id_that_would_be_cut_away(side: str, container: Any) -> None:
    for ids, index in (([-7, 1, 2], 0), ([1, -7, 2], 1), ([1, 2, -7], 2)):
        for width in (0, 1, 2):
            with pytest.raises(ValueError, match=rf"{index}\b.*-7"):
                native(side)([[5], container(ids)], width)


@given(IDS, st.integers(0, 15), PAD)
def test_lists_as_agentlightning_documents_them(ids: list[int], width: int, pad: int) -> None:
    before = list(ids)
    for name in (
        "get_left_padded_ids_and_attention_mask",
        "get_right_padded_ids_and_attention_mask",
    ):
        result = getattr(agl_fast, name)(ids, width, pad)
        assert result == getattr(reference, name)(ids, width, pad)
        assert [type(part) for part in result] == [list, list]
        assert [len(part) for part in result] == [width, width]
    assert ids == before


@on_both_sides
@pytest.mark.parametrize(
    ("ids", "error", "named"),
    [
        pytest.param([1, -7, 3], (ValueError,), ["1", "-7"], id="negative"),
        pytest.param([1, 2, 1.5], (TypeError,), ["2", "1.5"], id="float"),
        pytest.param([1, 2.0], (TypeError,), ["1", "2.0"], id="whole_float"),
        pytest.param([1, "2"], (TypeError,), ["1"], id="string"),
        pytest.param([1, None], (TypeError,), ["1"], id="none"),
        pytest.param([2**31], (ValueError,), ["2147483648"], id="beyond_int32"),
        pytest.param([2**70], (ValueError,), ["0"], id="beyond_int64"),
        pytest.param([[1], [2, -7]], (ValueError,), ["1", "-7"], id="negative_in_a_batch"),
        pytest.param([[1], [2, 1.5]], (TypeError,), ["1", "1.5"], id="float_in_a_batch"),
        pytest.param(np.array([3, -7], np.int32), (ValueError,), ["1", "-7"], id="array"),
        pytest.param(np.array([3, -7], np.int64), (ValueError,), ["1", "-7"], id="array_int64"),
        pytest.param(np.array([2**31]), (ValueError,), ["2147483648"], id="array_beyond_int32"),
        pytest.param(torch.tensor([3, -7]), (ValueError,), ["1", "-7"], id="tensor"),
        pytest.param(np.array([1.0]), (TypeError, ValueError), ["float64"], id="float_array"),
        pytest.param(np.array([1], np.int16), (TypeError, ValueError), ["int16"], id="int16"),
        pytest.param(np.array([True]), (TypeError, ValueError), ["bool"], id="bool_array"),
        pytest.param(torch.tensor([1.0]), (TypeError, ValueError), ["float32"], id="float_tensor"),
        pytest.param(np.array([[1, 2]]), (TypeError, ValueError), ["1, 2"], id="2d_array"),
        pytest.param(torch.tensor([[1, 2]]), (TypeError, ValueError), ["1, 2"], id="2d_tensor"),
        pytest.param([np.array([[1]])], (TypeError, ValueError), ["1, 1"], id="2d_in_a_batch"),
        pytest.param([5, True], (TypeError,), ["1", "True"], id="bool"),
        pytest.param(5, (TypeError, ValueError), ["int"], id="no_sequence"),
        pytest.param("12", (TypeError, ValueError), ["str"], id="text"),
        pytest.param({1: 2}, (TypeError, ValueError), ["dict"], id="dict"),
    ],
)
def test_bad_ids(side: str, ids: Any, error: Any, named: list[str]) -> None:
    with pytest.raises(error) as raised:
        native(side)(ids, 4, 0)
    for part in named:
        assert part in str(raised.value)


@on_both_sides
def test_bad_options(side: str) -> None:
    with pytest.raises(ValueError, match=r"max_length.*-1"):
        native(side)([1], -1)
    with pytest.raises(TypeError, match=r"pad_token_id.*None"):
        native(side)([1], 1, None)
    with pytest.raises(TypeError, match="max_length"):
        native(side)([1], 1.5)
