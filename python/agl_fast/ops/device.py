"""Devices: when the CUDA kernels run, staging memory and output memory."""

from __future__ import annotations

import functools
import importlib.util
import logging
from math import prod

import torch

logger = logging.getLogger(__name__)

# CUDA's messages for a build that cannot run on this machine at all: cudaGetErrorString of
# NoKernelImageForDevice, InvalidDeviceFunction, InvalidKernelImage, UnsupportedPtxVersion,
# JitCompilerNotFound, JitCompilationDisabled, InsufficientDriver, SystemDriverMismatch and
# CompatNotSupportedOnDevice.
OF_THE_BUILD = (
    "no kernel image is available",
    "invalid device function",
    "device kernel image is invalid",
    "unsupported toolchain",
    "PTX JIT compiler library not found",
    "PTX JIT compilation was disabled",
    "driver version is insufficient",
    "unsupported display driver / cuda driver combination",
    "forward compatibility was attempted on non supported HW",
)


@functools.cache
def built() -> bool:
    """Whether agl_fast was built with CUDA kernels; logs a warning once if not."""
    # find_spec, not import: a module that fails to load is present.
    if importlib.util.find_spec("agl_fast._cuda") is not None:
        return True
    logger.warning(
        "agl_fast was built without CUDA: batches for a GPU are filled on the host and copied. "
        "Build it where nvcc is found (AGL_CUDA=ON) to fill them on the device."
    )
    return False


def runs_on(device: torch.device) -> bool:
    """Whether the CUDA kernels fill tensors on ``device``.

    Raises:
        RuntimeError: ``device`` is a CUDA device and torch finds none; or the first kernel fails
            for another reason than the build, such as insufficient memory.
    """
    if device.type != "cuda":
        return False
    if not torch.cuda.is_available():
        raise RuntimeError(f"device={str(device)!r}, but torch {torch.__version__} finds no GPU")
    return built() and _runs_kernels(device.index)


@functools.cache
def _runs_kernels(index: int | None) -> bool:
    """Try one kernel on a device; log the reason if the build does not support the device."""
    device = torch.device("cuda") if index is None else torch.device("cuda", index)
    try:
        launch_one(device)
    except (ImportError, RuntimeError) as error:
        if isinstance(error, torch.cuda.OutOfMemoryError) or not _is_of_the_build(error):
            raise
        logger.warning(
            "agl_fast's CUDA kernels do not run on %s (%s): batches for it are filled on the host "
            "and copied. They need the card's architecture and a CUDA toolkit that the driver "
            "knows: build agl_fast on this machine with AGL_CUDA=ON, or update the driver.",
            device,
            error,
        )
        return False
    return True


def launch_one(device: torch.device) -> None:
    """Pad one sequence of one id on a device.

    Raises:
        ImportError: the kernels do not load.
        RuntimeError: the launch failed; the message is CUDA's.
    """
    from agl_fast import _cuda

    with torch.cuda.device(device):
        offsets = torch.tensor([0, 1], device=device)
        values = torch.zeros(1, dtype=torch.int32, device=device)
        ids, mask = torch.empty(2, 1, dtype=torch.int64, device=device)
        _cuda.pad(
            values.data_ptr(),
            offsets.data_ptr(),
            1,
            1,
            0,
            left=True,
            ids=ids.data_ptr(),
            mask=mask.data_ptr(),
            stream=torch.cuda.current_stream().cuda_stream,
        )


def _is_of_the_build(error: Exception) -> bool:
    return isinstance(error, ImportError) or any(words in str(error) for words in OF_THE_BUILD)


def staging(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate uninitialised host bytes for a copy to ``device``, pinned for CUDA.

    torch does not reuse pinned memory before the copies queued from it are complete.
    """
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


class Buffers:
    """Allocates uninitialised output tensors by name.

    With ``reuse``, a name's memory is kept and returned again, which invalidates the tensor that
    used it before. The first touch of fresh memory costs far more than writing it again.
    """

    def __init__(self, device: torch.device, *, reuse: bool) -> None:
        self.device = device
        self._reuse = reuse
        self._kept: dict[str, torch.Tensor] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if not self._reuse:
            return torch.empty(shape, dtype=dtype, device=self.device)
        size = prod(shape)
        kept = self._kept.get(name)
        if kept is None or kept.numel() < size or kept.dtype != dtype:
            self._kept.pop(name, None)  # frees it before the new allocation
            kept = self._kept[name] = torch.empty(size, dtype=dtype, device=self.device)
        return kept[:size].view(shape)
