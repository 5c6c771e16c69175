"""When the optional CUDA kernels run, and how bytes get to them."""

from __future__ import annotations

import functools
import importlib.util
import logging

import torch

logger = logging.getLogger(__name__)


@functools.cache
def built() -> bool:
    """Whether agl_fast was built with its CUDA kernels; says so once where it was not."""
    # Looked for, not tried: a module that is there but fails to load must not look absent.
    if importlib.util.find_spec("agl_fast._cuda") is not None:
        return True
    logger.warning(
        "agl_fast was built without CUDA: batches for a GPU are filled on the host and copied. "
        "Build it where nvcc is found (AGL_CUDA=ON) to fill them on the device."
    )
    return False


def runs_on(device: torch.device) -> bool:
    """Whether tensors for ``device`` are to be filled by the CUDA kernels.

    Raises:
        RuntimeError: ``device`` is a CUDA device and torch finds none.
    """
    if device.type != "cuda":
        return False
    if not torch.cuda.is_available():
        raise RuntimeError(f"device={str(device)!r}, but torch {torch.__version__} finds no GPU")
    return built()


def staging(nbytes: int, device: torch.device) -> torch.Tensor:
    """Uninitialised host bytes to be copied to ``device``, pinned where that makes them faster.

    torch keeps pinned memory from reuse until the copies queued from it are done.
    """
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
