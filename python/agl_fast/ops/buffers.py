"""Output memory: fresh for every batch, or kept from batch to batch."""

from __future__ import annotations

from math import prod

import torch


class Buffers:
    """Hands out uninitialised tensors by name.

    With ``reuse``, a name's memory is kept and handed out again: the tensor that had it before
    becomes invalid. The first touch of fresh memory costs far more than writing it again.
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
            self._kept.pop(name, None)  # before the new memory is asked for
            kept = self._kept[name] = torch.empty(size, dtype=dtype, device=self.device)
        return kept[:size].view(shape)
