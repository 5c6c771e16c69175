"""Pad token sequences to tensors and to lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from agl_fast import _core
from agl_fast.ops.argument_checks import INT32_MAX, INT64_MAX, INT64_MIN, integer
from agl_fast.ops.device import runs_on, staging


def pad_left(
    ids: Any,
    max_length: int | None = None,
    pad_token_id: int = 0,
    *,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad token sequences on the left, as prompts are.

    Args:
        ids: one sequence or a batch of them. A sequence is a list or tuple of int, or a 1-D int32
            or int64 numpy array or torch tensor. An empty list is one empty sequence.
        max_length: width L of the result; a longer sequence keeps its last L tokens. None means
            the longest.
        pad_token_id: id of padding.
        device: of the result; None means the CPU.

    Returns:
        ``(input_ids, attention_mask)``, int64, of shape (B, L) for a batch and (L,) for one
        sequence; the mask is 1 on tokens and 0 on padding.

    Raises:
        TypeError: ``ids`` or one of its ids has the wrong type.
        ValueError: an id is outside 0 … 2**31 - 1, an array is not 1-D, or ``max_length`` is
            negative. Both name the sequence, the index and the value.
    """
    return _pad(ids, max_length, pad_token_id, left=True, device=device)


def pad_right(
    ids: Any,
    max_length: int | None = None,
    pad_token_id: int = 0,
    *,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad token sequences on the right, as responses are.

    As ``pad_left``, but a sequence longer than ``max_length`` keeps its first tokens.
    """
    return _pad(ids, max_length, pad_token_id, left=False, device=device)


def _pad(
    ids: Any,
    max_length: int | None,
    pad_token_id: int,
    *,
    left: bool,
    device: torch.device | str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if max_length is not None:
        max_length = _width(max_length)
    pad_token_id = integer("pad_token_id", pad_token_id, INT64_MIN, INT64_MAX)
    sequences = _core.Sequences(ids)
    width = sequences.longest if max_length is None else max_length
    if width < sequences.longest:
        sequences.check_rest(width, left=left)
    target = torch.device("cpu" if device is None else device)
    if target.type == "cuda":
        values, offsets = map(torch.from_numpy, sequences.ragged(width, left=left))
        padded = pad_ragged(values, offsets, width, pad_token_id, left=left, device=target)
    else:
        shape = (len(sequences), width)
        padded = (torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.int64))
        sequences.pad(
            width, pad_token_id, left=left, ids=padded[0].data_ptr(), mask=padded[1].data_ptr()
        )
    input_ids, attention_mask = (tensor.to(target) for tensor in padded)
    return (input_ids[0], attention_mask[0]) if sequences.single else (input_ids, attention_mask)


def get_left_padded_ids_and_attention_mask(
    ids: Sequence[int], max_length: int, pad_token_id: int
) -> tuple[list[int], list[int]]:
    """Left-pad, or cut to the last tokens, one list of ids. Lists in, lists out.

    Args:
        ids: list or tuple of token ids.
        max_length: length of both results.
        pad_token_id: id of padding.

    Returns:
        ``(padded_ids, attention_mask)``; the mask is 1 on tokens and 0 on padding.

    Raises:
        TypeError: ``ids`` is neither list nor tuple, or ``max_length`` is not an int. The ids
            themselves are not checked.
        ValueError: ``max_length`` is negative.
    """
    return _core.pad_list(ids, _width(max_length), pad_token_id, left=True)


def get_right_padded_ids_and_attention_mask(
    ids: Sequence[int], max_length: int, pad_token_id: int
) -> tuple[list[int], list[int]]:
    """Right-pad, or cut to the first tokens, one list of ids. Lists in, lists out.

    As ``get_left_padded_ids_and_attention_mask`` otherwise.
    """
    return _core.pad_list(ids, _width(max_length), pad_token_id, left=False)


def _width(max_length: int) -> int:
    return integer("max_length", max_length, 0, INT32_MAX)


def pad_ragged(
    values: torch.Tensor,
    offsets: torch.Tensor,
    width: int,
    pad_token_id: int,
    *,
    left: bool,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad B concatenated sequences to ``input_ids`` and ``attention_mask``, (B, width) int64.

    Sequence i is ``values[offsets[i]:offsets[i + 1]]``; ``values`` is int32, ``offsets`` (B + 1,)
    int64, both contiguous on the host. Left padding keeps a sequence's last ``width`` ids, right
    padding its first.

    Raises:
        RuntimeError: ``device`` is a CUDA device and torch finds none.
    """
    rows = offsets.numel() - 1
    on_device = runs_on(device)
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

    # One copy for both: the offsets, then the ids.
    head = offsets.nbytes
    buffer = staging(head + values.nbytes, device)
    buffer[:head].view(torch.int64).copy_(offsets)
    buffer[head:].view(torch.int32).copy_(values)
    with torch.cuda.device(device):
        moved = buffer.to(device, non_blocking=True)  # keeps the memory alive until the launch
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
