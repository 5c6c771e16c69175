"""Flat rows → padded tensors, on the device that will use them."""

from __future__ import annotations

import torch

from agl_fast import _core
from agl_fast.ops import cuda


def expand(
    flat: _core.FlatRows,
    prompt_width: int,
    response_width: int,
    pad_token_id: int,
    *,
    outputs: dict[str, torch.Tensor],
) -> None:
    """Write B planned rows as padded tensors; P = ``prompt_width``, R = ``response_width``.

    On a CUDA device one kernel writes them all, queued on torch's current stream behind one copy of
    the rows' real tokens. In host memory the kernel's twin does, over the same arrays.

    Args:
        flat: rows that fit the widths.
        prompt_width: P.
        response_width: R.
        pad_token_id: id written where no token is.
        outputs: contiguous, on one device: ``prompts`` (B, P), ``responses`` and ``response_mask``
            (B, R), ``input_ids``, ``attention_mask`` and ``position_ids`` (B, P + R), int64;
            ``token_level_scores`` (B, R) float32; where wanted, ``call_index`` (B, R) int64 and
            ``rollout_log_probs`` (B, R) float32.
    """
    device = outputs["prompts"].device
    addresses = {name: tensor.data_ptr() for name, tensor in outputs.items()}
    buffer = cuda.staging(flat.nbytes, device)
    flat.write(buffer.data_ptr())
    if device.type != "cuda":
        _core.expand_host(
            buffer.data_ptr(),
            flat.counts,
            prompt_width,
            response_width,
            pad_token_id,
            outputs=addresses,
        )
        return

    from agl_fast import _cuda

    with torch.cuda.device(device):
        moved = buffer.to(device, non_blocking=True)  # named, to outlive the launch
        _cuda.expand(
            moved.data_ptr(),
            flat.counts,
            prompt_width,
            response_width,
            pad_token_id,
            outputs=addresses,
            stream=torch.cuda.current_stream().cuda_stream,
        )
