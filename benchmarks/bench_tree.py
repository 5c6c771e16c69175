"""Prefix trees: what building them costs."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

import agl_fast
from agl_fast import reference
from benchmarks.answers import assert_every_sampled_token_is_trained
from benchmarks.baselines import PAD_TOKEN_ID
from benchmarks.conversations import Conversation, for_agl_fast, load_traces, random_ids
from benchmarks.workload import Answers, Competitor, Prepared, Row, Size, Workload

SEED = 20_250_804
# Above every trace's length, so that every call is laid out and no row is cut.
NO_LIMIT = 1 << 20


def options(level: str) -> dict[str, Any]:
    return {
        "level": level,
        "max_prompt_length": NO_LIMIT,
        "max_response_length": NO_LIMIT,
        "pad_token_id": PAD_TOKEN_ID,
        "layout": "jagged",
        "call_index": True,
    }


def as_arrays(conversation: Conversation) -> Conversation:
    """The ids as one int32 array a prompt and a response: what the proxy records."""
    calls = [
        (np.array(prompt, np.int32), np.array(response, np.int32))
        for prompt, response in conversation.calls
    ]
    return conversation._replace(calls=calls)


def for_the_reference(conversations: list[Conversation]) -> list[SimpleNamespace]:
    """What the reference reads: it checks nothing, so plain objects will do."""
    absent = {"log_probs": None, "reward": None, "response_id": None, "finish_reason": None}
    return [
        SimpleNamespace(
            rollout_id=rollout_id,
            data_id=data_id,
            calls=[
                SimpleNamespace(prompt_ids=prompt, response_ids=response, trainable=True, **absent)
                for prompt, response in calls
            ],
            reward=reward,
            status=None,
        )
        for rollout_id, data_id, calls, reward in conversations
    ]


def build(conversations: list[Conversation], level: str) -> Callable[[], agl_fast.Batch]:
    """From calls at hand to a batch in fresh memory."""

    def run() -> agl_fast.Batch:
        return agl_fast.build_batch(for_agl_fast(conversations), **options(level))

    return run


def assert_same_as_reference(mine: agl_fast.Batch, expected: reference.Batch) -> None:
    assert mine.accounting == expected.accounting
    assert mine.rollouts == expected.rollouts
    assert mine.tensors.keys() == expected.tensors.keys()
    for name, rows in expected.tensors.items():
        tensor = mine.tensors[name]
        assert [row.tolist() for row in tensor.unbind()] == rows, name


def prepare_kernel(name: str, size: Size) -> Prepared:
    lists = load_traces(name)[: size.rollouts_of_traces]
    arrays = [as_arrays(each) for each in lists]
    plain = for_the_reference(lists)
    n_sampled = sum(len(response) for each in lists for _, response in each.calls)

    def check(answers: Answers) -> None:
        for competitor, batch in answers.items():
            if competitor != "python":
                assert_every_sampled_token_is_trained(batch, n_sampled)
            if competitor.endswith("trees"):
                assert_same_as_reference(batch, answers["python"])

    return Prepared(
        {
            "python": Competitor(partial(reference.build_batch, plain, **options("tree"))),
            "lists, calls": Competitor(build(lists, "transition")),
            "lists, trees": Competitor(build(lists, "tree")),
            "arrays, calls": Competitor(build(arrays, "transition")),
            "arrays, trees": Competitor(build(arrays, "tree")),
        },
        check,
    )


def kernel(name: str) -> Workload:
    return Workload(
        f"tree_kernel_{name}",
        partial(prepare_kernel, name),
        (
            Row(f"trees of {name}, arrays, against plain Python", "python", "arrays, trees", 100),
            Row("… lists", "python", "lists, trees", 100),
            Row(
                "… arrays, against one row a call",
                "arrays, calls",
                "arrays, trees",
                1.0,
                at_most=True,
            ),
            Row("… lists", "lists, calls", "lists, trees", 1.0, at_most=True),
        ),
        rounds=5,
        threads=1,
    )


def prepare_one_by_one(size: Size) -> Prepared:
    """The same calls, each a difference to the one before, as one rollout or as eight."""
    n_calls, n_tokens = 16 * size.rollouts, 8
    rng = np.random.default_rng(SEED)
    tails, responses = (
        [random_ids(rng, n_tokens) for _ in range(n_calls)] for _ in ("tails", "responses")
    )

    def add(n_rollouts: int) -> Callable[[], agl_fast.BatchBuilder]:
        def run() -> agl_fast.BatchBuilder:
            builder = agl_fast.BatchBuilder(**options("tree") | {"tree_max_tokens": NO_LIMIT})
            for at in range(n_calls):
                turn, rollout = divmod(at, n_rollouts)
                base = turn - 1 if turn else None
                # History leaves out the end of the answer.
                keep = turn * (2 * n_tokens - 1)
                builder.add_call(f"rollout-{rollout}", base, keep, tails[at], responses[at])
            return builder

        return run

    def check(answers: Answers) -> None:
        for builder in answers.values():
            batch = builder.finish()
            assert batch.accounting.trained == n_calls * n_tokens
            assert batch.tensors["input_ids"].values().numel() == 2 * n_calls * n_tokens

    return Prepared(
        {"eight rollouts": Competitor(add(8)), "one rollout": Competitor(add(1))}, check
    )


ONE_BY_ONE = Workload(
    "tree_one_by_one",
    prepare_one_by_one,
    (
        Row(
            "4,096 calls told one by one, as one rollout, against eight of 512 calls",
            "eight rollouts",
            "one rollout",
            1.3,
            at_most=True,
        ),
    ),
    rounds=9,
    threads=1,
)

WORKLOADS = (kernel("swe_nothink"), kernel("swe_think"), ONE_BY_ONE)
