"""Checks of the competitors' answers."""

from typing import Any

import torch

import agl_fast


def assert_same_tensors(mine: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for one, other in zip(mine, expected, strict=True):
        assert torch.equal(one, other)


def assert_same_as_agentlightning(
    mine: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    """Bit-equal to 0.3.0's tensors, apart from the scores' precision."""
    assert set(expected) <= set(mine)
    for name, tensor in expected.items():
        assert torch.equal(mine[name].to(tensor.dtype), tensor), name


def assert_jagged_equals_padded(
    mine: dict[str, torch.Tensor], padded: dict[str, torch.Tensor]
) -> None:
    """Every jagged tensor holds what the padded one of its name holds on real tokens."""
    attention = padded["attention_mask"].bool()
    width = padded["prompts"].shape[1]
    masks = {"prompts": attention[:, :width], "input_ids": attention, "position_ids": attention}
    for name, tensor in mine.items():
        expected = padded[name]
        if tensor.is_nested:
            tensor, expected = tensor.values(), expected[masks.get(name, attention[:, width:])]
        assert torch.equal(tensor.to(expected.dtype), expected), name


def assert_same_nested(mine: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(mine.values(), expected.values())
    assert torch.equal(mine.offsets(), expected.offsets().to(mine.offsets().dtype))


def assert_every_sampled_token_is_trained(batch: agl_fast.Batch, sampled: int) -> None:
    accounting = batch.accounting
    assert accounting.sampled == accounting.trained == sampled


def bytes_of(tensors: dict[str, Any]) -> int:
    """Bytes of the tensors' memory."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
