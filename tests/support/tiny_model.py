"""A tiny random Qwen2 and a tokenizer for it, made on the spot: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# A turn's ids do not depend on what follows it, so that the prompt of a later call begins with the
# ids of the earlier call, as long as its answer is tokenised the way it was sampled.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Whatever a random model writes is valid text in these characters. With all 256 bytes it would
# mostly be broken UTF-8, which no tokenizer gives back.
PRINTABLE_ASCII = "\n" + "".join(map(chr, range(32, 127)))

# Few, so that sampled ids are seldom those that their text is tokenised to in the next call.
N_MERGES = 16


def make_tokenizer(corpus: Iterable[str], *, max_length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on `corpus`, over printable ASCII."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = {
        symbol
        for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(PRINTABLE_ASCII)
        for symbol in piece
    }
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + N_MERGES,
        min_frequency=2,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_tiny_model(folder: Path, corpus: Iterable[str], *, max_length: int, seed: int) -> int:
    """Write a float32 model and its tokenizer to `folder`; return the number of parameters."""
    tokenizer = make_tokenizer(corpus, max_length=max_length)
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            # As long as the tokenizer: vLLM would sample ids that it cannot decode.
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=max_length,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype=torch.float32,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(model.num_parameters())
