"""Assert that rollouts that were written and read are the ones before."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import agl_fast


def same_number(found: Any, expected: Any) -> bool:
    if isinstance(expected, float) and math.isnan(expected):
        return isinstance(found, float) and math.isnan(found)
    return type(found) is type(expected) and found == expected


def assert_same_rollouts(found: list[agl_fast.Rollout], expected: list[agl_fast.Rollout]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for name in ("rollout_id", "data_id", "status", "sample"):
            assert getattr(one, name) == getattr(other, name)
        assert same_number(one.reward, other.reward)
        assert len(one.calls) == len(other.calls)
        for call, expected_call in zip(one.calls, other.calls, strict=True):
            assert_same_call(call, expected_call)


def assert_same_call(found: agl_fast.Call, expected: agl_fast.Call) -> None:
    for name in ("prompt_ids", "response_ids"):
        assert getattr(found, name).dtype == np.int32
        assert getattr(found, name).tolist() == [int(each) for each in getattr(expected, name)]
    if expected.log_probs is None:
        assert found.log_probs is None
    else:
        as_float32 = np.asarray(expected.log_probs, np.float32)
        assert found.log_probs.tobytes() == as_float32.tobytes()
    assert same_number(found.reward, expected.reward)
    if expected.position_ids is None:
        assert found.position_ids is None
    else:
        assert found.position_ids.dtype == np.int64
        assert found.position_ids.tolist() == expected.position_ids.tolist()
    for name in (
        *("response_id", "finish_reason", "policy_version", "sampling"),
        *("agent", "trainable", "credit"),
    ):
        assert getattr(found, name) == getattr(expected, name)
