"""The reference reads any object with the fields of a rollout, and any container of numbers."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

import agl_fast
from agl_fast import reference
from support.batch_lists import assert_same, in_float32
from support.plain_rollouts import Containers, PlainRollout, to_native
from support.simulated_agents import options, rollouts_in_containers

OPTIONS: dict[str, Any] = {"max_prompt_length": 4, "max_response_length": 4, "pad_token_id": 0}


@given(rollouts_in_containers(), options())
def test_reads_agl_fast_rollouts(
    pairs: list[tuple[PlainRollout, Containers]], chosen: dict[str, Any]
) -> None:
    try:
        expected = reference.build_batch([plain for plain, _ in pairs], **chosen)
    except agl_fast.EmptyBatchError:
        return
    read = reference.build_batch([to_native(plain, held) for plain, held in pairs], **chosen)
    # Log-probs in float32 containers are rounded before the reference sees them.
    read.tensors = in_float32(read.tensors)
    assert_same(read, expected)


@pytest.mark.parametrize("ids", [(1, 2), np.array([1, 2], np.int32), torch.tensor([1, 2])])
def test_reads_simple_namespaces(ids: Any) -> None:
    call = SimpleNamespace(
        prompt_ids=ids,
        response_ids=ids,
        log_probs=None,
        reward=None,
        response_id=None,
        finish_reason=None,
        trainable=True,
    )
    rollout = SimpleNamespace(
        rollout_id="r0", data_id="d0", calls=[call], reward=np.float32(0.5), status=None
    )
    batch = reference.build_batch([rollout], **OPTIONS)
    assert batch.tensors["responses"] == [[1, 2, 0, 0]]
    assert batch.tensors["token_level_scores"] == [[0.0, 0.5, 0.0, 0.0]]


def test_loads_no_array_library() -> None:
    code = (
        "import sys, agl_fast.reference; "
        "print([name for name in ('numpy', 'torch') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
