"""Bad input is refused with its place and value, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import copy
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import agl_fast
from agl_fast import reference
from support.batch_lists import as_lists, assert_same
from support.plain_rollouts import PlainRollout, to_native
from support.simulated_agents import containers, options, several_rollouts

OPTIONS: dict[str, Any] = {"max_prompt_length": 8, "max_response_length": 8, "pad_token_id": 0}
BAD_CALL = 2


def native_rollout(**fields: Any) -> Any:
    """Rollout ``r-bad``; its call 2 has the given fields, the calls around it are good."""
    good = {"prompt_ids": [1, 2], "response_ids": [3]}
    calls = [agl_fast.Call(**good) for _ in range(4)]
    calls[BAD_CALL] = agl_fast.Call(**(good | fields))
    return agl_fast.Rollout("r-bad", "d0", calls, 1.0)


def refuse(error: Any, named: list[str], **fields: Any) -> None:
    with pytest.raises(error) as raised:
        agl_fast.build_batch([native_rollout(**fields)], **OPTIONS)
    message = str(raised.value)
    for part in ["r-bad", *named]:
        assert part in message, message
    assert re.search(rf"\b{BAD_CALL}\b", message), message


BAD_IDS = [
    pytest.param([5, 6, 7, -77], ValueError, ["3", "-77"], id="negative"),
    pytest.param((5, 6, 7, -77), ValueError, ["3", "-77"], id="negative_in_a_tuple"),
    pytest.param([5, 6, 7, 1.5], TypeError, ["3", "1.5"], id="float"),
    pytest.param([5, 6, 7, 1.0], TypeError, ["3", "1.0"], id="whole_float"),
    pytest.param([5, 6, 7, True], TypeError, ["3", "True"], id="bool"),
    pytest.param([5, 6, 7, "8"], TypeError, ["3", "8"], id="string"),
    pytest.param([5, 6, 7, None], TypeError, ["3", "None"], id="none"),
    pytest.param([5, 6, 7, [8]], TypeError, ["3"], id="nested"),
    pytest.param([5, 6, 7, 2**31], ValueError, ["3", str(2**31)], id="beyond_int32"),
    pytest.param([5, 6, 7, 2**40], ValueError, ["3", str(2**40)], id="far_beyond_int32"),
    pytest.param([5, 6, 7, 2**64 + 5], ValueError, ["3", str(2**64 + 5)], id="beyond_int64"),
    pytest.param([5, 6, 7, -(2**70)], ValueError, ["3", str(-(2**70))], id="far_negative"),
    pytest.param(np.array([5, 6, 7, -77], np.int32), ValueError, ["3", "-77"], id="int32"),
    pytest.param(np.array([5, 6, 7, -77], np.int64), ValueError, ["3", "-77"], id="int64"),
    pytest.param(np.array([5, 6, 7, 2**31]), ValueError, ["3", str(2**31)], id="int64_beyond"),
    pytest.param(np.array([5, 6, 7, 2**32 + 5]), ValueError, ["3", str(2**32 + 5)], id="wraps"),
    pytest.param(torch.tensor([5, 6, 7, -77]), ValueError, ["3", "-77"], id="tensor"),
    pytest.param(torch.tensor([5, 6, 7, 2**31]), ValueError, ["3", str(2**31)], id="tensor_beyond"),
    pytest.param(np.array([[5, 6]]), (TypeError, ValueError), ["1, 2"], id="2d_array"),
    pytest.param(torch.tensor([[5, 6]]), (TypeError, ValueError), ["1, 2"], id="2d_tensor"),
    pytest.param(np.array(5), (TypeError, ValueError), [], id="0d_array"),
    pytest.param(np.array([5.0]), (TypeError, ValueError), ["float64"], id="float_array"),
    pytest.param(np.array([5], np.int16), (TypeError, ValueError), ["int16"], id="int16"),
    pytest.param(np.array([5], np.uint32), (TypeError, ValueError), ["uint32"], id="uint32"),
    pytest.param(np.array([True]), (TypeError, ValueError), ["bool"], id="bool_array"),
    pytest.param(np.array([5, None]), (TypeError, ValueError), ["object"], id="object_array"),
    pytest.param(np.array([5], ">i4"), (TypeError, ValueError), [">i4"], id="big_endian"),
    pytest.param(torch.tensor([5.0]), (TypeError, ValueError), ["float32"], id="float_tensor"),
    pytest.param("12", TypeError, ["str"], id="text"),
    pytest.param(None, TypeError, ["None"], id="missing"),
    pytest.param({5: 6}, TypeError, ["dict"], id="dict"),
]


@pytest.mark.parametrize("field", ["prompt_ids", "response_ids"])
@pytest.mark.parametrize(("ids", "error", "named"), BAD_IDS)
def test_ids(field: str, ids: Any, error: Any, named: list[str]) -> None:
    refuse(error, [field, *named], **{field: ids})


def test_a_bad_id_behind_a_shared_prefix() -> None:
    """Where the prompt repeats a context, the repeated part is compared, and the rest is read."""
    shared = list(range(1000, 1100))
    calls = [
        agl_fast.Call(shared, [5]),
        agl_fast.Call([*shared, 5, 6, 1.5], [7]),
    ]
    with pytest.raises(TypeError, match=r"1\.5") as raised:
        agl_fast.build_batch([agl_fast.Rollout("r-bad", "d0", calls)], **OPTIONS)
    for part in ("r-bad", "prompt_ids", "102"):
        assert part in str(raised.value)


def test_equal_to_a_token_is_not_a_token() -> None:
    """5.0 == 5, but a float in a prompt is an error even where the context has a 5."""
    calls = [agl_fast.Call([1], [5]), agl_fast.Call([1, 5.0, 6], [7])]
    with pytest.raises(TypeError, match=r"5\.0"):
        agl_fast.build_batch([agl_fast.Rollout("r-bad", "d0", calls)], **OPTIONS)


@pytest.mark.parametrize(
    ("log_probs", "error", "named"),
    [
        pytest.param([-0.5], ValueError, ["2", "1"], id="too_few"),
        pytest.param([-0.5] * 3, ValueError, ["2", "3"], id="too_many"),
        pytest.param([], ValueError, ["2", "0"], id="none_of_them"),
        pytest.param([-0.5, float("nan")], ValueError, ["1", "nan"], id="nan"),
        pytest.param([-0.5, float("inf")], ValueError, ["1", "inf"], id="inf"),
        pytest.param([float("-inf"), -0.5], ValueError, ["0", "-inf"], id="minus_inf"),
        pytest.param(np.array([-0.5, np.nan]), ValueError, ["1", "nan"], id="array_nan"),
        pytest.param(np.array([-0.5]), ValueError, ["2", "1"], id="array_too_few"),
        pytest.param(torch.tensor([-0.5, torch.inf]), ValueError, ["1", "inf"], id="tensor_inf"),
        pytest.param(np.array([[-0.5, -0.5]]), (TypeError, ValueError), ["1, 2"], id="2d"),
        pytest.param([-0.5, None], TypeError, ["1", "None"], id="missing"),
        pytest.param([-0.5, "x"], TypeError, ["1", "x"], id="string"),
        pytest.param("ab", TypeError, ["'ab'"], id="text"),
    ],
)
def test_log_probs(log_probs: Any, error: Any, named: list[str]) -> None:
    refuse(error, ["log_probs", *named], response_ids=[3, 4], log_probs=log_probs)


@pytest.mark.parametrize("infinity", [float("inf"), float("-inf")])
def test_infinite_rewards(infinity: float) -> None:
    refuse(ValueError, ["reward", "inf"], reward=infinity)
    rollout = agl_fast.Rollout("r-bad", "d0", [agl_fast.Call([1], [2])], infinity)
    with pytest.raises(ValueError, match=r"r-bad.*reward.*inf"):
        agl_fast.build_batch([rollout], **OPTIONS)


def test_reward_of_the_wrong_type() -> None:
    refuse(TypeError, ["reward", "good"], reward="good")


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("level", "sentence", ValueError),
        ("layout", "sparse", ValueError),
        ("overlong_prompt", "crash", ValueError),
        ("max_prompt_length", True, TypeError),
        ("truncated_rollouts", "ignore", ValueError),
        ("pad_token_id", None, TypeError),
        ("pad_token_id", 1.5, TypeError),
        ("max_prompt_length", 0, ValueError),
        ("max_prompt_length", -3, ValueError),
        ("max_prompt_length", None, TypeError),
        ("max_prompt_length", 1.5, TypeError),
        ("max_response_length", 0, ValueError),
        ("max_response_length", None, TypeError),
        ("max_total_length", 0, ValueError),
        ("max_total_length", 1.5, TypeError),
        ("reward_fillna_value", float("inf"), ValueError),
        ("reward_fillna_value", float("nan"), ValueError),
        ("reward_fillna_value", None, TypeError),
        ("tokenizer", 5, TypeError),
    ],
)
def test_options(name: str, value: Any, error: Any) -> None:
    with pytest.raises(error) as raised:
        agl_fast.build_batch([native_rollout()], **(OPTIONS | {name: value}))
    assert name in str(raised.value)
    assert str(value) in str(raised.value)


def test_no_rollouts() -> None:
    with pytest.raises(ValueError, match="no rollouts"):
        agl_fast.build_batch([], **OPTIONS)


def test_no_rows_is_an_error_that_says_where_the_tokens_went() -> None:
    calls = [agl_fast.Call([1], [2, 3], finish_reason="abort")]
    with pytest.raises(agl_fast.EmptyBatchError) as raised:
        agl_fast.build_batch([agl_fast.Rollout("r0", "d0", calls)], **OPTIONS)
    assert isinstance(raised.value, ValueError)
    assert raised.value.accounting.dropped_by_reason["aborted"] == 2


@given(
    several_rollouts(),
    several_rollouts(),
    options(),
    st.sampled_from(["prompt_ids", "response_ids", "log_probs", "reward"]),
    st.integers(0, 3),
)
def test_an_error_leaves_the_builder_as_it_was(
    before: list[PlainRollout],
    after: list[PlainRollout],
    chosen: dict[str, Any],
    field: str,
    n_good_calls: int,
) -> None:
    for index, one in enumerate(after):
        one.rollout_id = f"after{index}"
    try:
        expected = reference.build_batch(before + after, **chosen)
    except agl_fast.EmptyBatchError:
        return
    bad_value: Any = {"reward": float("inf"), "log_probs": [float("nan")]}.get(field, [1, -1])
    good = {"prompt_ids": [1, 2], "response_ids": [3]}
    calls = [agl_fast.Call(**good) for _ in range(n_good_calls)]
    calls.append(agl_fast.Call(**(good | {field: bad_value})))

    builder = agl_fast.BatchBuilder(**chosen)
    for one in before:
        builder.add(to_native(one))
    with pytest.raises(ValueError, match="r-bad"):
        builder.add(agl_fast.Rollout("r-bad", "d0", calls))
    for one in after:
        builder.add(to_native(one))
    assert_same(as_lists(builder.finish()), expected)


@given(st.data(), several_rollouts(), options())
def test_input_stays_as_it_was(
    data: st.DataObject, rollouts: list[PlainRollout], chosen: dict[str, Any]
) -> None:
    held = [data.draw(containers(one)) for one in rollouts]
    before = copy.deepcopy(held)
    native = [to_native(one, each) for one, each in zip(rollouts, held, strict=True)]
    with contextlib.suppress(agl_fast.EmptyBatchError):
        agl_fast.build_batch(native, **chosen)
    for one, each, copied in zip(native, held, before, strict=True):
        assert len(one.calls) == len(each.ids)
        for call, ids, copied_ids in zip(one.calls, each.ids, copied.ids, strict=True):
            assert call.prompt_ids is ids[0]
            assert _listed(call.prompt_ids) == _listed(copied_ids[0])
            assert _listed(call.response_ids) == _listed(copied_ids[1])


def test_the_batch_shares_no_memory_with_its_input() -> None:
    prompt, response = np.array([1, 2], np.int64), np.array([3], np.int64)
    rollout = agl_fast.Rollout("r0", "d0", [agl_fast.Call(prompt, response)])
    batch = agl_fast.build_batch([rollout], **OPTIONS)
    prompt[:] = response[:] = 9
    assert batch.tensors["prompts"][0, -2:].tolist() == [1, 2]
    assert batch.tensors["responses"][0, :1].tolist() == [3]


def test_read_only_arrays_are_read() -> None:
    prompt = np.array([1, 2], np.int32)
    prompt.flags.writeable = False
    rollout = agl_fast.Rollout("r0", "d0", [agl_fast.Call(prompt, (3,))])
    assert agl_fast.build_batch([rollout], **OPTIONS).accounting.trained == 1


def _listed(ids: Any) -> list[int]:
    return ids.tolist() if hasattr(ids, "tolist") else list(ids)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_prompt_length": 2**63, "trim": True}, ValueError),
        ({"max_response_length": 2**31}, ValueError),
        ({"pad_token_id": 2**63}, ValueError),
        ({"reward_fillna_value": 1e300}, ValueError),
        ({"trim": "false"}, TypeError),
        ({"call_index": 1}, TypeError),
    ],
)
def test_options_out_of_range_are_named(options: Any, error: Any) -> None:
    with pytest.raises(error, match=next(iter(options))):
        agl_fast.BatchBuilder(**{**OPTIONS, **options})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"trainable": "False"}, "trainable"),
        ({"trainable": None}, "trainable"),
        ({"response_id": [1]}, "response_id"),
    ],
)
def test_call_fields_of_a_wrong_type_are_named(fields: Any, named: str) -> None:
    refuse(TypeError, [named], **fields)


def test_an_empty_response_id_is_none() -> None:
    calls = [agl_fast.Call([1], [2], response_id=""), agl_fast.Call([3], [4], response_id="")]
    batch = agl_fast.build_batch([agl_fast.Rollout("r", "d", calls)], **OPTIONS)
    assert batch.accounting.duplicate == 0
    assert batch.accounting.trained == 2


@pytest.mark.parametrize("text", ["错误没有令牌", "x" + "é" * 20, b"\xff[1]"])
def test_text_that_is_no_ascii_is_refused_with_a_position(text: Any) -> None:
    with pytest.raises(ValueError, match="position 0"):
        agl_fast.parse_token_ids(text)
