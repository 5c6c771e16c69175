"""What people use today: the code each benchmark is measured against."""

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from benchmarks.agentlightning_daemon import Daemon, daemon_module, tensors_of
from benchmarks.conversations import Conversation, for_agentlightning

Padded = tuple[torch.Tensor, torch.Tensor]
PAD_TOKEN_ID = 0


def python_lists(ids: Sequence[list[int]], width: int) -> list[tuple[list[int], list[int]]]:
    """Agent-lightning's own padding function, list by list."""
    pad = daemon_module().get_left_padded_ids_and_attention_mask
    return [pad(one, width, PAD_TOKEN_ID) for one in ids]


def python_then_tensor(ids: Sequence[list[int]], width: int) -> Padded:
    """The same, then one tensor of ids and one of masks."""
    padded = python_lists(ids, width)
    return torch.tensor([one for one, _ in padded]), torch.tensor([mask for _, mask in padded])


def tensors_then_pad_sequence(ids: Sequence[list[int]], width: int) -> Padded:
    """A tensor per sequence, torch's pad_sequence, and a mask from the lengths."""
    sequences = [torch.tensor(one[-width:]) for one in ids]
    padded = pad_sequence(
        sequences, batch_first=True, padding_value=PAD_TOKEN_ID, padding_side="left"
    )
    padded = torch.nn.functional.pad(padded, (width - padded.shape[1], 0), value=PAD_TOKEN_ID)
    lengths = torch.tensor([len(one) for one in sequences])
    mask = (torch.arange(width) >= width - lengths[:, None]).long()
    return padded, mask


def huggingface_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that only pads."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<pad>": PAD_TOKEN_ID}, unk_token="<pad>")),
        pad_token="<pad>",
        padding_side="left",
    )


def huggingface_pad(
    tokenizer: PreTrainedTokenizerFast, ids: Sequence[list[int]], width: int
) -> Padded:
    """`tokenizer.pad`; it does not shorten, so no sequence may be longer than `width`."""
    padded = tokenizer.pad(
        {"input_ids": list(ids)}, padding="max_length", max_length=width, return_tensors="pt"
    )
    return padded["input_ids"], padded["attention_mask"]


def agentlightning_daemon(
    conversations: Sequence[Conversation], *, level: str = "trajectory"
) -> Daemon:
    """0.3.0's daemon with these rollouts finished."""
    return Daemon(for_agentlightning(conversations), level=level, pad_token_id=PAD_TOKEN_ID)


def agentlightning_tensors(
    daemon: Daemon, prompt_width: int, response_width: int
) -> dict[str, torch.Tensor]:
    """The body of 0.3.0's `get_train_data_batch`."""
    data_proto, _ = daemon.get_train_data_batch(prompt_width, response_width)
    return tensors_of(data_proto)


def verl_no_padding(tensors: dict[str, torch.Tensor]) -> Any:
    """verl's conversion of a padded batch; its input is left as it was."""
    from tensordict import TensorDict
    from verl.workers.utils.padding import left_right_2_no_padding

    rows = tensors["input_ids"].shape[0]
    return left_right_2_no_padding(TensorDict(tensors, batch_size=rows))
