"""The CUDA kernels on a device, against the host."""

from __future__ import annotations

import importlib.util
import random

import numpy as np
import pytest
import torch

import agl_fast
from agl_fast import Call, Rollout
from agl_fast.ops.pad import pad_ragged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or importlib.util.find_spec("agl_fast._cuda") is None,
        reason="needs a CUDA device and a build with CUDA",
    ),
]


def rollouts(count, calls, rng):
    """Growing conversations, half of them with log-probs, some with a forgotten history."""
    made = []
    for index in range(count):
        context = [rng.randrange(1000) for _ in range(rng.randint(1, 40))]
        turns = []
        for turn in range(calls):
            response = [rng.randrange(1000) for _ in range(rng.randint(1, 50))]
            log_probs = [-rng.random() for _ in response] if (index + turn) % 2 else None
            turns.append(Call(list(context), response, log_probs))
            context = context + response + [rng.randrange(1000) for _ in range(rng.randint(0, 9))]
            if rng.random() < 0.1:
                context = context[len(context) // 2 :]
        made.append(Rollout(f"r{index}", f"d{index}", turns, rng.random()))
    return made


def build(device, **options):
    made = rollouts(40, 6, random.Random(1))
    return agl_fast.build_batch(made, pad_token_id=7, device=device, **options).tensors


def assert_same(device_tensors, host_tensors):
    assert device_tensors.keys() == host_tensors.keys()
    for name, host in host_tensors.items():
        assert device_tensors[name].device.type == "cuda", name
        assert torch.equal(device_tensors[name].cpu(), host), name


@pytest.mark.parametrize("prompt_width", [1, 16, 33])
@pytest.mark.parametrize("response_width", [1, 200, 401])
@pytest.mark.parametrize("call_index", [False, True])
def test_batches_equal_the_host_s(prompt_width, response_width, call_index):
    options = {
        "max_prompt_length": prompt_width,
        "max_response_length": response_width,
        "call_index": call_index,
    }
    assert_same(build("cuda", **options), build(None, **options))


@pytest.mark.parametrize("options", [{"trim": True}, {"level": "transition"}, {"layout": "jagged"}])
def test_batches_of_other_shapes_equal_the_host_s(options):
    options |= {"max_prompt_length": 32, "max_response_length": 301}
    on_device, on_host = build("cuda", **options), build(None, **options)
    assert on_device.keys() == on_host.keys()
    for name, host in on_host.items():
        made = on_device[name]
        if host.is_nested:
            assert torch.equal(made.offsets().cpu(), host.offsets()), name
            made, host = made.values(), host.values()
        assert torch.equal(made.cpu(), host), name


@pytest.mark.parametrize("pad", [agl_fast.pad_left, agl_fast.pad_right])
@pytest.mark.parametrize("max_length", [None, 0, 1, 64, 65])
def test_padding_equals_the_host_s(pad, max_length):
    rng = np.random.default_rng(2)
    ids = [rng.integers(0, 2**31, length) for length in rng.integers(0, 100, 33)]
    for made, host in zip(
        pad(ids, max_length, 5, device="cuda"), pad(ids, max_length, 5), strict=True
    ):
        assert made.device.type == "cuda"
        assert torch.equal(made.cpu(), host)


@pytest.mark.parametrize(("rows", "width"), [(65_540, 3), (3, 40_001)])
def test_padding_more_than_the_grid_has_blocks(rows, width):
    lengths = torch.randint(0, 2 * width, (rows,), generator=torch.Generator().manual_seed(3))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    values = torch.arange(int(offsets[-1]), dtype=torch.int32)
    for left in (True, False):
        made, host = (
            pad_ragged(values, offsets, width, 5, left=left, device=torch.device(name))
            for name in ("cuda", "cpu")
        )
        assert torch.equal(made[0].cpu(), host[0])
        assert torch.equal(made[1].cpu(), host[1])


def test_torch_s_current_stream_is_the_one_used():
    options = {"max_prompt_length": 32, "max_response_length": 301}
    expected = build(None, **options)
    expected_pad = agl_fast.pad_left([[1, 2], [3]], 4, 0)
    build("cuda", **options)  # whatever is loaded at the first launch waits for the whole device
    agl_fast.pad_left([[1, 2], [3]], 4, 0, device="cuda")
    torch.cuda.synchronize()

    # The default stream is busy for a while: a kernel queued there would come too late.
    busy = torch.ones(8192, 8192, device="cuda")
    for _ in range(50):
        busy = busy @ busy
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        batch = build("cuda", **options)
        padded = agl_fast.pad_left([[1, 2], [3]], 4, 0, device="cuda")
        made = {name: tensor.cpu() for name, tensor in batch.items()}
        made_pad = [tensor.cpu() for tensor in padded]
    assert all(torch.equal(made[name], expected[name]) for name in expected)
    assert all(map(torch.equal, made_pad, expected_pad))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_device_than_the_current_one():
    options = {"max_prompt_length": 32, "max_response_length": 301}
    other = build("cuda:1", **options)
    assert {tensor.get_device() for tensor in other.values()} == {1}
    assert_same(other, build(None, **options))
