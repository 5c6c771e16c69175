"""What happens where the CUDA kernels, or a device for them, are missing."""

from __future__ import annotations

import importlib.util
import logging

import pytest
import torch

import agl_fast
from agl_fast.ops import cuda

GPU = torch.device("cuda")


@pytest.fixture
def _built_without_cuda(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *package: None if name == "agl_fast._cuda" else find_spec(name, *package),
    )
    cuda.built.cache_clear()
    yield
    cuda.built.cache_clear()


@pytest.mark.usefixtures("_built_without_cuda")
def test_a_build_without_cuda_leaves_gpu_batches_to_the_host_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with caplog.at_level(logging.WARNING, logger="agl_fast"):
        assert not cuda.runs_on(GPU)
        assert not cuda.runs_on(GPU)
    assert [record.message for record in caplog.records if "without CUDA" in record.message] == [
        caplog.records[0].message
    ]


def test_the_kernels_are_for_cuda_devices_only():
    assert not cuda.runs_on(torch.device("cpu"))
    assert not cuda.runs_on(torch.device("meta"))


def test_a_missing_gpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"device='cuda'.*finds no GPU"):
        cuda.runs_on(GPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("pad", [agl_fast.pad_left, agl_fast.pad_right])
def test_padding_for_a_missing_gpu_fails(pad):
    with pytest.raises(RuntimeError, match="finds no GPU"):
        pad([[1, 2], [3]], device="cuda")


@pytest.mark.skipif(importlib.util.find_spec("agl_fast._cuda") is None, reason="built without CUDA")
def test_the_kernels_load_and_count_devices_without_a_driver():
    from agl_fast import _cuda

    assert (_cuda.device_count() > 0) == torch.cuda.is_available()
