"""A tiny Qwen2 with a tokenizer and chat template of Qwen's kind, and its warm-up.

Nothing is downloaded. The warm-up is supervised, in two lessons: how boxes are opened, then to lose
patience and guess, which most people of the second lesson do. That patience pays is left to
reinforcement learning.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from agl_fast.quickstart.boxes import OPEN_TOOL, THINK, THINK_END, Message, a_conversation

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# One token each, as a larger model's tokenizer has them for the first four. The last two keep a
# call short: what is to be learned is not drowned by its form.
MARKUP = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    '<tool_call>\n{"name": "open", "arguments": {"box": ',
    "}}\n</tool_call>",
)

# And these of a model that reasons.
REASONING_MARKUP = (f"{THINK}\n", f"\n{THINK_END}\n")

VOCABULARY = 512
MAX_LENGTH = 256
CONVERSATIONS_PER_STEP = 16
# Each is heard once for every answer in it.
REASONING_CONVERSATIONS_PER_STEP = 16
IGNORED = -100


@dataclass(frozen=True)
class Lesson:
    """A part of the warm-up.

    Attributes:
        patience: see `boxes.a_conversation`.
        tools_listed_every: the prompt says in every how many-th step which tools there are, as it
            does in use. Without, it is half as long and says the same numbers.
        rate: the highest learning rate.
    """

    patience: float
    tools_listed_every: int
    steps: int
    rate: float


LESSONS = (
    Lesson(patience=1.0, tools_listed_every=2, steps=140, rate=4e-3),
    Lesson(patience=0.3, tools_listed_every=1, steps=60, rate=1e-3),
)

# An answer is written in the history exactly as it was sampled, so that the prompt of a later call
# begins with the ids of the earlier one and both become one row. Its reasoning is not: as in the
# templates of models that reason, only the last message keeps it, and calls no longer merge.
CHAT_TEMPLATE = """\
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' -%}
{{- '<|im_start|>system\n' + system -}}
{%- if tools -%}
{{- '\n<tools>\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\n' -}}{%- endfor -%}
{{- '</tools>' -}}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- for message in messages -%}
{%- if message['role'] == 'tool' -%}
{{- '<|im_start|>user\n<tool_response>\n' + message['content'] -}}
{{- '\n</tool_response><|im_end|>\n' -}}
{%- elif message['role'] != 'system' -%}
{{- '<|im_start|>' + message['role'] + '\n' -}}
{%- set content = message['content'] or '' -%}
{%- if '</think>' in content and not loop.last -%}
{{- content.split('</think>')[-1].lstrip('\n') -}}
{%- else -%}{{- content -}}{%- endif -%}
{%- for call in message['tool_calls'] or [] -%}
{{- '<tool_call>\n{"name": "' + call['function']['name'] + '", "arguments": ' -}}
{{- call['function']['arguments'] | tojson + '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


def make_tokenizer(
    texts: Iterable[str], *, max_length: int = MAX_LENGTH, markup: Iterable[str] = MARKUP
) -> Qwen2Tokenizer:
    """Train a byte-level BPE tokenizer of Qwen2's class on `texts`."""
    # Its rules for splitting text are taken from the class: whoever loads a Qwen2 model uses it.
    tokenizer = Qwen2Tokenizer(vocab={}, merges=[]).backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    learned = json.loads(tokenizer.to_str())["model"]
    qwen = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(pair) for pair in learned["merges"]],
        unk_token=PAD,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    qwen.add_tokens(list(markup))
    qwen.chat_template = CHAT_TEMPLATE
    return qwen


def new_model(tokenizer: Qwen2Tokenizer, *, max_length: int = MAX_LENGTH) -> Qwen2ForCausalLM:
    """A tiny random float32 model, of torch's seed."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            # As long as the tokenizer: vLLM would sample ids that it cannot decode.
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=3,
            max_position_embeddings=max_length,
            tie_word_embeddings=False,
            initializer_range=0.08,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype=torch.float32,
        )
    )


def make_tiny_model(folder: Path, *, seed: int, reasoning: bool = False) -> int:
    """Write a warmed-up float32 model and its tokenizer to `folder`.

    Args:
        reasoning: it reasons before every answer.

    Returns:
        The number of parameters.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    heard = [a_conversation(rng, patience=0.5, reasoning=reasoning) for _ in range(200)]
    tokenizer = make_tokenizer(
        map(_plain_text, heard), markup=MARKUP + REASONING_MARKUP if reasoning else MARKUP
    )
    model = new_model(tokenizer)
    for lesson in LESSONS:
        warm_up(model, tokenizer, lesson, rng, reasoning=reasoning)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(model.num_parameters())


def warm_up(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    lesson: Lesson,
    rng: random.Random,
    *,
    reasoning: bool,
) -> None:
    """Teach the model to speak as people in the lesson do."""

    n = REASONING_CONVERSATIONS_PER_STEP if reasoning else CONVERSATIONS_PER_STEP

    def heard(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        tools = [OPEN_TOOL] if step % lesson.tools_listed_every == 0 else None
        some = [a_conversation(rng, lesson.patience, reasoning=reasoning) for _ in range(n)]
        if reasoning:
            some = [begun for each in some for begun in up_to_each_answer(each)]
        return labelled(tokenizer, some, tools)

    learn(model, map(heard, range(lesson.steps)), steps=lesson.steps, rate=lesson.rate)


def up_to_each_answer(conversation: list[Message]) -> list[list[Message]]:
    """What is said up to the first answer, up to the second, …"""
    return [
        conversation[: i + 1]
        for i, message in enumerate(conversation)
        if message["role"] == "assistant"
    ]


def learn(
    model: Qwen2ForCausalLM,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    *,
    steps: int,
    rate: float,
) -> None:
    """Cross entropy on what the assistant writes.

    Args:
        batches: of `labelled`, one a step.
        rate: the highest learning rate.
    """
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=rate, total_steps=steps, pct_start=0.1
    )
    for input_ids, labels in batches:
        attention_mask = (input_ids != model.config.pad_token_id).long()
        loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()


def labelled(
    tokenizer: Qwen2Tokenizer,
    conversations: Sequence[list[Message]],
    tools: list[dict[str, Any]] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The conversations as token ids, and the labels: the ids that the assistant writes, else -100.

    Where the last message reasons, it alone is labelled: the others' reasoning is not there.

    Returns:
        Two (conversations, width) int64 tensors, right-padded.
    """
    start = tokenizer.encode(f"{TURN_START}assistant\n")
    rows = [
        tokenizer.apply_chat_template(each, tools=tools, return_dict=False)
        for each in conversations
    ]
    width = max(map(len, rows))
    input_ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), IGNORED)
    for i, row in enumerate(rows):
        input_ids[i, : len(row)] = torch.tensor(row)
        is_answer = False
        for j, token in enumerate(row):
            if is_answer:
                labels[i, j] = token
            if token == tokenizer.eos_token_id:
                is_answer = False
            elif row[j + 1 - len(start) : j + 1] == start:
                is_answer = True
                if THINK_END in (conversations[i][-1]["content"] or ""):
                    labels[i, : j + 1] = IGNORED
    return input_ids, labels


def _plain_text(conversation: list[Message]) -> str:
    """What a tokenizer should know, about as often as it is said."""
    said = [str(OPEN_TOOL).replace("'", '"')]
    for message in conversation:
        said.append(f"{message['role']}\n{message['content'] or ''}")
        for call in message.get("tool_calls", ()):
            said.append(json.dumps(call["function"]))
    return "\n".join(said)
