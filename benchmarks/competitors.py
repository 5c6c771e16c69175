"""Who competes at which work, and what their answers must be."""

import ctypes
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

import agl_fast
from benchmarks import baselines
from benchmarks.answers import (
    assert_jagged_equals_padded,
    assert_same_as_agentlightning,
    assert_same_nested,
    assert_same_tensors,
    bytes_of,
)
from benchmarks.baselines import PAD_TOKEN_ID
from benchmarks.conversations import (
    Conversation,
    as_lists,
    as_separate_lists,
    for_agl_fast,
    growing,
    load_traces,
    random_ids,
    random_lists,
    single_calls,
)
from benchmarks.workload import Answers, Competitor, Prepared, Size

SEED = 20_250_803


def options(size: Size, *, response_width: int | None = None, **others: Any) -> dict[str, Any]:
    return {
        "max_prompt_length": size.prompt_width,
        "max_response_length": response_width or size.long_response_width,
        "pad_token_id": PAD_TOKEN_ID,
        **others,
    }


def build(conversations: list[Conversation], **build_options: Any) -> Callable[[], agl_fast.Batch]:
    """Plan and fill, from calls at hand to a batch in fresh memory."""

    def run() -> agl_fast.Batch:
        return agl_fast.build_batch(for_agl_fast(conversations), **build_options)

    return run


def build_reusing(
    conversations: list[Conversation], **build_options: Any
) -> Callable[[], agl_fast.Batch]:
    """The same into the memory of the batch before."""
    builder = agl_fast.BatchBuilder(**build_options, reuse_buffers=True)

    def run() -> agl_fast.Batch:
        builder.add_many(for_agl_fast(conversations))
        return builder.finish()

    return run


def prepare_pad_left(size: Size) -> Prepared:
    width = size.padded_width
    ids = random_lists(SEED, size.padded_lists, width // 4, width)
    tokenizer = baselines.huggingface_tokenizer()

    def check(answers: Answers) -> None:
        expected = answers["python"]
        for name in ("agl_fast", "pad_sequence", "tokenizer.pad"):
            assert_same_tensors(answers[name], expected)

    return Prepared(
        {
            "python": Competitor(partial(baselines.python_then_tensor, ids, width)),
            "pad_sequence": Competitor(partial(baselines.tensors_then_pad_sequence, ids, width)),
            "tokenizer.pad": Competitor(partial(baselines.huggingface_pad, tokenizer, ids, width)),
            "agl_fast": Competitor(partial(agl_fast.pad_left, ids, width, PAD_TOKEN_ID)),
        },
        check,
    )


def prepare_pad_left_lists(size: Size) -> Prepared:
    width = size.padded_width
    ids = random_lists(SEED, size.padded_lists, width // 4, width)

    def run() -> list[Any]:
        pad = agl_fast.get_left_padded_ids_and_attention_mask
        return [pad(one, width, PAD_TOKEN_ID) for one in ids]

    def check(answers: Answers) -> None:
        for mine, expected in zip(answers["agl_fast"], answers["python"], strict=True):
            assert mine == expected

    return Prepared(
        {
            "python": Competitor(partial(baselines.python_lists, ids, width)),
            "agl_fast": Competitor(run),
        },
        check,
    )


def prepare_single_calls(size: Size) -> Prepared:
    conversations = single_calls(SEED, size.rollouts, size.prompt_width, size.response_width)
    daemon = baselines.agentlightning_daemon(conversations)

    def check(answers: Answers) -> None:
        for name in ("fresh", "reused"):
            assert_same_as_agentlightning(answers[name].tensors, answers["agentlightning"])

    limits = options(size, response_width=size.response_width)
    return Prepared(
        {
            "agentlightning": Competitor(
                partial(
                    baselines.agentlightning_tensors, daemon, size.prompt_width, size.response_width
                )
            ),
            "fresh": Competitor(build(conversations, **limits)),
            "reused": Competitor(build_reusing(conversations, **limits)),
        },
        check,
    )


def grown(size: Size) -> list[Conversation]:
    return growing(SEED, size.rollouts, size.calls, size.grown_length, size.prompt_width)


def prepare_growing(size: Size) -> Prepared:
    arrays = grown(size)
    lists = as_lists(arrays)
    daemon = baselines.agentlightning_daemon(lists)
    padded, jagged = options(size), options(size, layout="jagged")

    def check(answers: Answers) -> None:
        expected = answers["agentlightning"]
        for name in ("lists, reused", "lists, fresh", "arrays, reused"):
            assert_same_as_agentlightning(answers[name].tensors, expected)
        for name in ("arrays, jagged, reused", "arrays, jagged, fresh"):
            assert_jagged_equals_padded(answers[name].tensors, expected)

    return Prepared(
        {
            "agentlightning": Competitor(
                partial(
                    baselines.agentlightning_tensors,
                    daemon,
                    size.prompt_width,
                    size.long_response_width,
                )
            ),
            "lists, reused": Competitor(build_reusing(lists, **padded)),
            "lists, fresh": Competitor(build(lists, **padded)),
            "arrays, reused": Competitor(build_reusing(arrays, **padded)),
            "arrays, jagged, reused": Competitor(build_reusing(arrays, **jagged)),
            "arrays, jagged, fresh": Competitor(build(arrays, **jagged)),
        },
        check,
    )


def prepare_separate_lists(size: Size) -> Prepared:
    lists = as_separate_lists(grown(size)[: size.rollouts // 4 or 1])
    daemon = baselines.agentlightning_daemon(lists)

    def check(answers: Answers) -> None:
        assert_same_as_agentlightning(answers["reused"].tensors, answers["agentlightning"])

    return Prepared(
        {
            "agentlightning": Competitor(
                partial(
                    baselines.agentlightning_tensors,
                    daemon,
                    size.prompt_width,
                    size.long_response_width,
                )
            ),
            "reused": Competitor(build_reusing(lists, **options(size))),
        },
        check,
    )


def prepare_fill(size: Size) -> Prepared:
    """Rows are planned before the clock starts; `finish` alone is timed, into warm memory."""
    arrays = grown(size)
    builder = agl_fast.BatchBuilder(**options(size), reuse_buffers=True)

    def plan() -> None:
        for rollout in for_agl_fast(arrays):
            builder.add(rollout)

    expected = agl_fast.build_batch(for_agl_fast(arrays), **options(size)).tensors
    buffer = np.empty(bytes_of(expected), dtype=np.uint8)

    def memset() -> np.ndarray:
        ctypes.memset(buffer.ctypes.data, 7, buffer.nbytes)
        return buffer

    def check(answers: Answers) -> None:
        tensors = answers["finish"].tensors
        assert tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(tensors[name], tensor), name
        assert (answers["memset"] == 7).all()

    return Prepared(
        {"memset": Competitor(memset), "finish": Competitor(builder.finish, plan)}, check
    )


def prepare_jagged(size: Size) -> Prepared:
    arrays = grown(size)
    padded = agl_fast.build_batch(for_agl_fast(arrays), **options(size)).tensors

    def check(answers: Answers) -> None:
        for competitor in ("reused", "fresh"):
            mine = answers[competitor].tensors
            for name in ("input_ids", "position_ids"):
                assert_same_nested(mine[name], answers["verl"][name])
            assert_jagged_equals_padded(mine, padded)

    return Prepared(
        {
            "verl": Competitor(partial(baselines.verl_no_padding, padded)),
            "reused": Competitor(build_reusing(arrays, **options(size, layout="jagged"))),
            "fresh": Competitor(build(arrays, **options(size, layout="jagged"))),
        },
        check,
    )


def prepare_parse(size: Size) -> Prepared:
    ids = random_ids(np.random.default_rng(SEED), size.parsed_ids).tolist()
    text = json.dumps(ids)

    def check(answers: Answers) -> None:
        assert answers["json.loads"] == ids
        assert answers["agl_fast"].dtype == np.int32
        assert answers["agl_fast"].tolist() == ids

    return Prepared(
        {
            "json.loads": Competitor(partial(json.loads, text)),
            "agl_fast": Competitor(partial(agl_fast.parse_token_ids, text)),
        },
        check,
    )


def prepare_traces(size: Size) -> Prepared:
    """Limits above every length, so that nothing is cut and 0.3.0's rows are ours."""
    conversations = load_traces(*size.traces)[: size.rollouts_of_traces]
    daemon = baselines.agentlightning_daemon(conversations)
    longest = max(len(p) + len(r) for one in conversations for p, r in one.calls)
    limits = {
        "max_prompt_length": longest,
        "max_response_length": longest,
        "pad_token_id": PAD_TOKEN_ID,
        "trim": True,
    }
    trimmed = agl_fast.build_batch(for_agl_fast(conversations), **limits).tensors
    widths = trimmed["prompts"].shape[1], trimmed["responses"].shape[1]

    def check(answers: Answers) -> None:
        for name in ("fresh", "reused"):
            assert_same_as_agentlightning(answers[name].tensors, answers["agentlightning"])

    return Prepared(
        {
            "agentlightning": Competitor(
                partial(baselines.agentlightning_tensors, daemon, *widths)
            ),
            "fresh": Competitor(build(conversations, **limits)),
            "reused": Competitor(build_reusing(conversations, **limits)),
        },
        check,
    )


def prepare_cuda(size: Size) -> Prepared:
    """The batch on the device: built there, or built here and copied."""
    arrays = grown(size)
    on_device = agl_fast.BatchBuilder(**options(size), device="cuda", reuse_buffers=True)
    on_host = build_reusing(arrays, **options(size))

    def copy_padded() -> dict[str, torch.Tensor]:
        tensors = {name: tensor.to("cuda") for name, tensor in on_host().tensors.items()}
        torch.cuda.synchronize()
        return tensors

    def expand_there() -> dict[str, torch.Tensor]:
        for rollout in for_agl_fast(arrays):
            on_device.add(rollout)
        tensors = on_device.finish().tensors
        torch.cuda.synchronize()
        return tensors

    def check(answers: Answers) -> None:
        for name, tensor in answers["copied"].items():
            assert torch.equal(answers["expanded"][name], tensor), name

    return Prepared(
        {"copied": Competitor(copy_padded), "expanded": Competitor(expand_there)}, check
    )
