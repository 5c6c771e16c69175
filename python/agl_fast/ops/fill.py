"""Fill tensors from planned rows."""

from __future__ import annotations

import torch

from agl_fast import _core
from agl_fast.ops.device import Buffers, runs_on, staging

# Tensor names by width: (B, P), (B, T) and (B, R).
PROMPT_KEYS = ("prompts",)
TOTAL_KEYS = ("input_ids", "attention_mask", "position_ids")
RESPONSE_KEYS = (
    "responses",
    "response_mask",
    "call_index",
    "token_level_scores",
    "rollout_log_probs",
)
FLOAT_KEYS = ("token_level_scores", "rollout_log_probs")


def _dtype(name: str) -> torch.dtype:
    return torch.float32 if name in FLOAT_KEYS else torch.int64


def _asked(names: tuple[str, ...], call_index: bool, log_probs: bool) -> list[str]:
    absent = {"call_index": not call_index, "rollout_log_probs": not log_probs}
    return [name for name in names if not absent.get(name, False)]


def padded(
    rows: _core.Rows,
    prompt_width: int,
    response_width: int,
    pad_token_id: int,
    *,
    call_index: bool,
    buffers: Buffers,
) -> dict[str, torch.Tensor]:
    """Fill the padded tensors of B rows; P = ``prompt_width``, R = ``response_width``, T = P + R.

    Returns:
        ``prompts`` (B, P), ``responses`` and ``response_mask`` (B, R), ``input_ids``,
        ``attention_mask`` and ``position_ids`` (B, T), all int64; ``token_level_scores`` (B, R)
        float32; with ``call_index``, ``call_index`` (B, R) int64; ``rollout_log_probs`` (B, R)
        float32 if any row has some. ``position_ids`` is (B, D, T) if calls have positions in D
        dimensions.

    Raises:
        ValueError: a row does not fit the widths.
        RuntimeError: the buffers are on a CUDA device and torch finds none.
    """
    log_probs = rows.any_log_probs
    # Tree rows are few and have little padding: fill them on the host and copy.
    on_device = runs_on(buffers.device) and not rows.branches
    home = buffers if on_device else _on_host(buffers)
    widths = dict.fromkeys(PROMPT_KEYS, prompt_width)
    widths |= dict.fromkeys(TOTAL_KEYS, prompt_width + response_width)
    widths |= dict.fromkeys(RESPONSE_KEYS, response_width)
    dims = {"position_ids": (rows.position_dims,) if rows.position_dims else ()}
    tensors = {
        name: home.empty(name, (len(rows), *dims.get(name, ()), widths[name]), _dtype(name))
        for name in _asked((*PROMPT_KEYS, *TOTAL_KEYS, *RESPONSE_KEYS), call_index, log_probs)
    }
    if on_device:
        expand(rows.flatten(), prompt_width, response_width, pad_token_id, outputs=tensors)
        return tensors
    outputs = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    rows.fill_padded(prompt_width, response_width, pad_token_id, outputs=outputs)
    return {name: tensor.to(buffers.device) for name, tensor in tensors.items()}


def _on_host(buffers: Buffers) -> Buffers:
    if buffers.device.type == "cpu":
        return buffers
    return Buffers(torch.device("cpu"), reuse=False)


def jagged(rows: _core.Rows, *, call_index: bool, buffers: Buffers) -> dict[str, torch.Tensor]:
    """Fill the same tensors without padding, as nested tensors of B rows (``torch.jagged``).

    There is no ``attention_mask``, as every token is real. Tensors of one width share offsets.
    ``position_ids`` in D dimensions has rows of shape (D, length).
    """
    lengths = dict(zip(("prompt", "response"), map(torch.from_numpy, rows.lengths), strict=True))
    families = {
        PROMPT_KEYS: lengths["prompt"],
        ("input_ids", "position_ids"): lengths["prompt"] + lengths["response"],
        RESPONSE_KEYS: lengths["response"],
    }
    host = _on_host(buffers)
    dims = {"position_ids": rows.position_dims}
    offsets = {}
    values = {}
    for names, family_lengths in families.items():
        starts = torch.zeros(len(rows) + 1, dtype=torch.int64)
        torch.cumsum(family_lengths, 0, out=starts[1:])
        for name in _asked(names, call_index, rows.any_log_probs):
            offsets[name] = starts
            shape = (dims[name], int(starts[-1])) if dims.get(name) else (int(starts[-1]),)
            values[name] = host.empty(f"jagged {name}", shape, _dtype(name))
    rows.fill_jagged(outputs={name: tensor.data_ptr() for name, tensor in values.items()})
    moved = {id(starts): starts.to(buffers.device) for starts in offsets.values()}
    return {
        name: torch.nested.nested_tensor_from_jagged(
            tensor.to(buffers.device), offsets=moved[id(offsets[name])], jagged_dim=tensor.dim()
        )
        for name, tensor in values.items()
    }


def expand(
    flat: _core.FlatRows,
    prompt_width: int,
    response_width: int,
    pad_token_id: int,
    *,
    outputs: dict[str, torch.Tensor],
) -> None:
    """Write B planned rows as padded tensors; P = ``prompt_width``, R = ``response_width``.

    On a CUDA device, one copy of the rows' real tokens and one kernel are queued on torch's current
    stream. In host memory, the same functor runs over the same arrays.

    Args:
        flat: rows that fit the widths.
        prompt_width: P.
        response_width: R.
        pad_token_id: id of padding.
        outputs: contiguous, on one device: ``prompts`` (B, P), ``responses`` and ``response_mask``
            (B, R), ``input_ids``, ``attention_mask`` and ``position_ids`` (B, P + R), int64, or
            ``position_ids`` (B, D, P + R) for positions in D dimensions;
            ``token_level_scores`` (B, R) float32; optional: ``call_index`` (B, R) int64 and
            ``rollout_log_probs`` (B, R) float32.
    """
    device = outputs["prompts"].device
    addresses = {name: tensor.data_ptr() for name, tensor in outputs.items()}
    buffer = staging(flat.nbytes, device)
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
        moved = buffer.to(device, non_blocking=True)  # keeps the memory alive until the launch
        _cuda.expand(
            moved.data_ptr(),
            flat.counts,
            prompt_width,
            response_width,
            pad_token_id,
            outputs=addresses,
            stream=torch.cuda.current_stream().cuda_stream,
        )
