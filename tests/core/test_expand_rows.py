"""The device kernel's functor, over planned rows as they are packed, against the host's fill."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from agl_fast import _core
from agl_fast.ops.device import Buffers
from agl_fast.ops.fill import expand, padded
from agl_fast.rows.levels import LevelName
from agl_fast.rows.options import RowOptions
from support.plain_rollouts import PlainRollout, rollout, to_native
from support.simulated_agents import several_rollouts

CPU = torch.device("cpu")


def planned(rollouts: list[PlainRollout], trajectory: bool, limits: dict[str, Any]) -> _core.Rows:
    level: LevelName = "trajectory" if trajectory else "transition"
    options = RowOptions(level=level, pad_token_id=7, overlong_prompt="spill", **limits)
    planner = _core.Planner(options)
    for plain in rollouts:
        native = to_native(plain)
        planner.add_many([native.rollout_id], [native.calls])
    rewards = np.arange(1, len(rollouts) + 1, dtype=np.float32)
    return planner.rows(rewards)


@given(
    several_rollouts(positions=True),
    st.booleans(),
    st.integers(1, 12),
    st.integers(1, 20),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_packed_rows_expand_to_what_the_host_fills(
    rollouts, trajectory, max_prompt, max_response, wider_prompt, wider_response
):
    limits = {"max_prompt_length": max_prompt, "max_response_length": max_response}
    rows = planned(rollouts, trajectory, limits)
    prompt_width = rows.longest[0] + wider_prompt
    response_width = rows.longest[1] + wider_response
    filled = padded(
        rows,
        prompt_width,
        response_width,
        7,
        call_index=True,
        buffers=Buffers(CPU, reuse=False),
    )
    expanded = {name: torch.full_like(tensor, -77) for name, tensor in filled.items()}
    flat = rows.flatten()
    expand(flat, prompt_width, response_width, 7, outputs=expanded)
    for name, tensor in filled.items():
        assert torch.equal(expanded[name], tensor), name
    prompts, responses = rows.lengths
    assert flat.counts[0] == len(rows)
    assert flat.counts[4] == rows.position_dims
    assert flat.counts[3] == prompts.sum() + responses.sum()  # real tokens and nothing else


def test_log_probs_are_packed_only_where_known():
    calls = [([1, 2], [3, 4], {"log_probs": [-0.5, -0.25]}), ([1, 2, 3, 4, 9], [5], {})]
    limits = {"max_prompt_length": 4, "max_response_length": 8}
    assert planned([rollout(*calls)], True, limits).flatten().counts == (1, 3, 2, 6, 0)
