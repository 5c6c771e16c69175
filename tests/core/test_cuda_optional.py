"""What happens where the CUDA kernels, or a device for them, are missing."""

from __future__ import annotations

import importlib.util
import logging
import re
from types import SimpleNamespace

import pytest
import torch

import agl_fast
from agl_fast.ops import device as device_ops

GPU = torch.device("cuda")


@pytest.fixture
def _built_without_cuda(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *package: None if name == "agl_fast._cuda" else find_spec(name, *package),
    )
    device_ops.built.cache_clear()
    yield
    device_ops.built.cache_clear()


@pytest.mark.usefixtures("_built_without_cuda")
def test_a_build_without_cuda_leaves_gpu_batches_to_the_host_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with caplog.at_level(logging.WARNING, logger="agl_fast"):
        assert not device_ops.runs_on(GPU)
        assert not device_ops.runs_on(GPU)
    assert [record.message for record in caplog.records if "without CUDA" in record.message] == [
        caplog.records[0].message
    ]


@pytest.fixture
def launched(monkeypatch):
    """Stands for launches on a card; `launched.error` is what CUDA answers."""
    fake = SimpleNamespace(error=None, devices=[])

    def launch(device):
        fake.devices.append(device)
        if fake.error is not None:
            raise fake.error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device_ops, "built", lambda: True)
    monkeypatch.setattr(device_ops, "launch_one", launch)
    device_ops._runs_kernels.cache_clear()
    yield fake
    device_ops._runs_kernels.cache_clear()


# cudaGetErrorString of CUDA 13, as `_cuda` raises it.
OF_THE_BUILD = [
    "no kernel image is available for execution on the device",
    "the provided PTX was compiled with an unsupported toolchain.",
    "CUDA driver version is insufficient for CUDA runtime version",
    "device kernel image is invalid",
    "invalid device function",
    "PTX JIT compiler library not found",
    "system has unsupported display driver / cuda driver combination",
    "forward compatibility was attempted on non supported HW",
]


@pytest.mark.parametrize("words", OF_THE_BUILD)
def test_kernels_that_a_card_cannot_run_leave_batches_to_the_host_and_say_so_once(
    launched, caplog, words
):
    launched.error = RuntimeError(f"pad kernel: {words}")
    with caplog.at_level(logging.WARNING, logger="agl_fast"):
        assert not device_ops.runs_on(GPU)
        assert not device_ops.runs_on(GPU)
    (record,) = caplog.records
    assert words in record.message
    assert "filled on the host" in record.message
    assert len(launched.devices) == 1


def test_kernels_that_do_not_load_leave_batches_to_the_host(launched, caplog):
    launched.error = ImportError("libcudart.so.13: cannot open shared object file")
    with caplog.at_level(logging.WARNING, logger="agl_fast"):
        assert not device_ops.runs_on(GPU)
    assert "libcudart.so.13" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
        RuntimeError("pad kernel: out of memory"),
        RuntimeError("pad kernel: an illegal memory access was encountered"),
        RuntimeError("pad kernel: no CUDA-capable device is detected"),
    ],
)
def test_other_errors_of_a_card_are_not_swallowed(launched, error):
    launched.error = error
    for _ in range(2):
        with pytest.raises(type(error), match=re.escape(str(error))):
            device_ops.runs_on(GPU)


def test_each_card_is_tried_once(launched):
    """Cards of one machine may be of different architectures."""
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    for device in (first, second, first, second):
        assert device_ops.runs_on(device)
    assert launched.devices == [first, second]


def test_the_kernels_are_for_cuda_devices_only():
    assert not device_ops.runs_on(torch.device("cpu"))
    assert not device_ops.runs_on(torch.device("meta"))


def test_a_missing_gpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"device='cuda'.*finds no GPU"):
        device_ops.runs_on(GPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("pad", [agl_fast.pad_left, agl_fast.pad_right])
def test_padding_for_a_missing_gpu_fails(pad):
    with pytest.raises(RuntimeError, match="finds no GPU"):
        pad([[1, 2], [3]], device="cuda")


@pytest.mark.skipif(importlib.util.find_spec("agl_fast._cuda") is None, reason="built without CUDA")
def test_the_kernels_load_and_count_devices_without_a_driver():
    from agl_fast import _cuda

    assert (_cuda.device_count() > 0) == torch.cuda.is_available()
