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
    call_index: bool,
    log_probs: bool,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """The padded tensors of B planned rows; P = ``prompt_width``, R = ``response_width``.

    With T = P + R: ``prompts`` (B, P), ``responses`` and ``response_mask`` (B, R), ``input_ids``,
    ``attention_mask`` and ``position_ids`` (B, T) are int64, ``token_level_scores`` (B, R) is
    float32; ``call_index`` (B, R) int64 and ``rollout_log_probs`` (B, R) float32 on request.

    On a CUDA device one kernel writes them all, queued on torch's current stream after one copy of
    the rows' real tokens. Elsewhere, and where the package was built without CUDA, its twin fills
    them on the host.

    Raises:
        RuntimeError: ``device`` is a CUDA device and torch finds none.
    """
    on_device = cuda.runs_on(device)
    home = device if on_device else torch.device("cpu")
    buffer = cuda.staging(flat.nbytes, home)
    flat.write(buffer.data_ptr())
    tensors = _allocate(
        flat.counts[0],
        prompt_width,
        response_width,
        call_index=call_index,
        log_probs=log_probs,
        device=home,
    )
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    if not on_device:
        _core.expand_host(
            buffer.data_ptr(),
            flat.counts,
            prompt_width,
            response_width,
            pad_token_id,
            outputs=addresses,
        )
        return {name: tensor.to(device) for name, tensor in tensors.items()}

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
    return tensors


def _allocate(
    rows: int,
    prompt_width: int,
    response_width: int,
    *,
    call_index: bool,
    log_probs: bool,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    def ids(width: int) -> torch.Tensor:
        return torch.empty((rows, width), dtype=torch.int64, device=device)

    def numbers() -> torch.Tensor:
        return torch.empty((rows, response_width), dtype=torch.float32, device=device)

    tensors = {
        "prompts": ids(prompt_width),
        "responses": ids(response_width),
        "input_ids": ids(prompt_width + response_width),
        "attention_mask": ids(prompt_width + response_width),
        "position_ids": ids(prompt_width + response_width),
        "response_mask": ids(response_width),
    }
    if call_index:
        tensors["call_index"] = ids(response_width)
    tensors["token_level_scores"] = numbers()
    if log_probs:
        tensors["rollout_log_probs"] = numbers()
    return tensors
