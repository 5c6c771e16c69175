"""A native batch as the lists that the reference gives, once its dtypes and shapes are checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from agl_fast import reference
from agl_fast.rows.accounting import EmptyBatchError
from support.plain_rollouts import PlainRollout

PADDED_WIDTHS = {
    "prompts": "P",
    "responses": "R",
    "input_ids": "T",
    "attention_mask": "T",
    "position_ids": "T",
    "response_mask": "R",
    "call_index": "R",
    "token_level_scores": "R",
    "rollout_log_probs": "R",
}
FLOAT_KEYS = ("token_level_scores", "rollout_log_probs")
JAGGED_FAMILIES = (
    ("prompts",),
    ("input_ids", "position_ids"),
    ("responses", "response_mask", "call_index", "token_level_scores", "rollout_log_probs"),
)
COLUMN_KINDS = {
    "turn_index_list": "i",
    "first_call_index_list": "i",
    "has_rollout_log_probs": "b",
}


def as_lists(batch: Any) -> reference.Batch:
    is_drop_mask = batch.tensors["is_drop_mask"]
    assert is_drop_mask.dtype == torch.bool
    n_rows = is_drop_mask.shape[0]
    assert is_drop_mask.shape == (n_rows,)
    if batch.tensors["prompts"].is_nested:
        tensors = _jagged_lists(batch.tensors, n_rows)
    else:
        tensors = _padded_lists(batch.tensors, n_rows)
    tensors["is_drop_mask"] = is_drop_mask.tolist()
    for name, column in batch.columns.items():
        assert isinstance(column, np.ndarray), name
        assert column.shape == (n_rows,), name
        if name in COLUMN_KINDS:
            assert column.dtype.kind == COLUMN_KINDS[name], name
    return reference.Batch(
        tensors=tensors,
        columns={name: column.tolist() for name, column in batch.columns.items()},
        rollouts=list(batch.rollouts),
        accounting=batch.accounting,
        mismatches=list(batch.mismatches),
    )


def assert_same(native: reference.Batch, expected: reference.Batch) -> None:
    assert native.tensors.keys() == expected.tensors.keys()
    for key, values in in_float32(expected.tensors).items():
        assert native.tensors[key] == values, key
    assert native.columns == expected.columns
    assert native.rollouts == expected.rollouts
    assert native.accounting == expected.accounting
    assert native.mismatches == expected.mismatches


def assert_same_outcome(build: Any, rollouts: list[PlainRollout], chosen: dict[str, Any]) -> None:
    """``build()`` gives what the reference gives, be it a batch or an EmptyBatchError."""
    try:
        expected = reference.build_batch(rollouts, **chosen)
    except EmptyBatchError as error:
        empty = error.accounting
    else:
        assert_same(as_lists(build()), expected)
        return
    with pytest.raises(EmptyBatchError) as raised:
        build()
    assert raised.value.accounting == empty


def _padded_lists(tensors: dict[str, torch.Tensor], n_rows: int) -> dict[str, Any]:
    width = {"P": tensors["prompts"].shape[1], "R": tensors["responses"].shape[1]}
    width["T"] = width["P"] + width["R"]
    lists = {}
    for key in tensors.keys() - {"is_drop_mask"}:
        tensor = tensors[key]
        assert (tensor.shape[0], tensor.shape[-1]) == (n_rows, width[PADDED_WIDTHS[key]]), key
        assert tensor.dim() == 2 or (key == "position_ids" and tensor.dim() == 3), key
        assert tensor.is_contiguous(), key
        assert tensor.dtype == _dtype(key), key
        lists[key] = tensor.tolist()
    return lists


def _jagged_lists(tensors: dict[str, torch.Tensor], n_rows: int) -> dict[str, Any]:
    lists = {}
    for family in JAGGED_FAMILIES:
        offsets = {tensors[key].offsets().data_ptr() for key in family if key in tensors}
        assert len(offsets) == 1, f"{family} have more than one offsets tensor"
        for key in family:
            if key in tensors:
                tensor = tensors[key]
                assert tensor.layout == torch.jagged, key
                assert tensor.shape[0] == n_rows, key
                assert tensor.dtype == _dtype(key), key
                lists[key] = [row.tolist() for row in tensor.unbind()]
    assert lists.keys() == tensors.keys() - {"is_drop_mask"}
    return lists


def _dtype(key: str) -> torch.dtype:
    return torch.float32 if key in FLOAT_KEYS else torch.int64


def in_float32(tensors: dict[str, Any]) -> dict[str, Any]:
    """The reference computes in double precision; the tensors hold single."""
    return {
        key: [np.array(row, np.float32).tolist() for row in values] if key in FLOAT_KEYS else values
        for key, values in tensors.items()
    }
