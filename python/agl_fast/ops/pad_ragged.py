"""Ragged ids → padded ids and mask, on the device that will use them."""

from __future__ import annotations

import torch

from agl_fast import _core
from agl_fast.ops import cuda


def pad_ragged(
    values: torch.Tensor,
    offsets: torch.Tensor,
    width: int,
    pad_token_id: int,
    *,
    left: bool,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``input_ids`` and ``attention_mask``, (B, width) int64, of B sequences that lie end to end.

    Sequence i is ``values[offsets[i]:offsets[i + 1]]``; ``values`` is int32, ``offsets`` (B + 1,)
    int64, both contiguous on the host. Left padding keeps a sequence's last ``width`` ids, right
    padding its first.

    Raises:
        RuntimeError: ``device`` is a CUDA device and torch finds none.
    """
    rows = offsets.numel() - 1
    on_device = cuda.runs_on(device)
    home = device if on_device else torch.device("cpu")
    ids = torch.empty((rows, width), dtype=torch.int64, device=home)
    mask = torch.empty((rows, width), dtype=torch.int64, device=home)
    if not on_device:
        _core.pad_host(
            values.data_ptr(),
            offsets.data_ptr(),
            rows,
            width,
            pad_token_id,
            left=left,
            ids=ids.data_ptr(),
            mask=mask.data_ptr(),
        )
        return ids.to(device), mask.to(device)

    from agl_fast import _cuda

    # One copy takes both: the offsets, then the ids.
    head = offsets.nbytes
    buffer = cuda.staging(head + values.nbytes, device)
    buffer[:head].view(torch.int64).copy_(offsets)
    buffer[head:].view(torch.int32).copy_(values)
    with torch.cuda.device(device):
        moved = buffer.to(device, non_blocking=True)  # named, to outlive the launch
        _cuda.pad(
            moved[head:].data_ptr(),
            moved.data_ptr(),
            rows,
            width,
            pad_token_id,
            left=left,
            ids=ids.data_ptr(),
            mask=mask.data_ptr(),
            stream=torch.cuda.current_stream().cuda_stream,
        )
    return ids, mask
