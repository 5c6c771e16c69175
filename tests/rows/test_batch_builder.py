"""What the builder promises beyond the rows: its memory, its life cycle, and what it reads."""

from __future__ import annotations

import logging
import pickle
import threading
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import agl_fast
from support.batch_lists import as_lists, assert_same

OPTIONS: dict[str, Any] = {"max_prompt_length": 4, "max_response_length": 4, "pad_token_id": 0}


def one_call(rollout_id: str = "r0", token: int = 2, reward: float | None = 1.0) -> Any:
    return agl_fast.Rollout(rollout_id, "d0", [agl_fast.Call([1], [token])], reward)


def test_reads_any_iterable_of_rollouts() -> None:
    rollouts = [one_call("r0"), one_call("r1")]
    batch = agl_fast.build_batch((rollout for rollout in rollouts), **OPTIONS)
    assert batch.columns["rollout_id_list"].tolist() == ["r0", "r1"]
    assert len(batch) == 2


def test_length_is_the_number_of_rollouts_added() -> None:
    builder = agl_fast.BatchBuilder(**OPTIONS)
    assert len(builder) == 0
    builder.add(one_call("r0"))
    builder.add_call("r1", None, 0, [1], [2])
    builder.add_call("r1", 0, 2, [], [3])
    assert len(builder) == 2
    builder.finish()
    assert len(builder) == 0


def test_a_rollout_stands_once_in_a_batch() -> None:
    builder = agl_fast.BatchBuilder(**OPTIONS)
    builder.add(one_call("r0"))
    with pytest.raises(ValueError, match="r0"):
        builder.add(one_call("r0"))
    builder.finish()
    builder.add(one_call("r0"))
    assert len(builder.finish()) == 1


def test_nothing_added_is_an_error() -> None:
    builder = agl_fast.BatchBuilder(**OPTIONS)
    for _ in range(2):
        with pytest.raises(ValueError, match="no rollouts"):
            builder.finish()


def test_an_empty_batch_is_over() -> None:
    builder = agl_fast.BatchBuilder(**OPTIONS)
    builder.add(agl_fast.Rollout("empty", "d0", [], 1.0))
    with pytest.raises(agl_fast.EmptyBatchError) as caught:
        builder.finish()
    assert caught.value.metrics["training/reward"] == caught.value.metrics["training/n_groups"] == 1
    assert caught.value.metrics["training/n_calls"] == 0
    builder.add(one_call())
    assert builder.finish().columns["rollout_id_list"].tolist() == ["r0"]


@pytest.mark.parametrize("layout", ["padded", "jagged"])
def test_fresh_buffers_leave_the_batch_before_alone(layout: str) -> None:
    builder = agl_fast.BatchBuilder(layout=layout, **OPTIONS)
    builder.add(one_call(token=2))
    first = builder.finish()
    before = as_lists(first)
    builder.add(one_call(token=3))
    builder.finish()
    assert_same(as_lists(first), before)


def test_reused_buffers_are_the_same_memory() -> None:
    builder = agl_fast.BatchBuilder(reuse_buffers=True, **OPTIONS)
    addresses = []
    for token in (2, 3):
        builder.add(one_call(token=token))
        batch = builder.finish()
        assert batch.tensors["responses"][0, 0] == token
        addresses.append(batch.tensors["responses"].data_ptr())
    assert addresses[0] == addresses[1]


def test_missing_rewards_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    rollouts = [one_call("r0"), one_call("r1", reward=None), one_call("r2", reward=float("nan"))]
    with caplog.at_level(logging.WARNING, logger="agl_fast"):
        batch = agl_fast.build_batch(rollouts, reward_fillna_value=-1.0, **OPTIONS)
    assert len(caplog.records) == 1
    for part in ("2 of 3", "'r1'", "-1"):
        assert part in caplog.text
    assert batch.metrics["training/n_rollouts_w_reward"] == 1


def test_device_is_where_the_tensors_live() -> None:
    batch = agl_fast.build_batch([one_call()], device=torch.device("cpu"), **OPTIONS)
    assert {tensor.device.type for tensor in batch.tensors.values()} == {"cpu"}


def test_an_open_rollout_is_a_group_of_its_own() -> None:
    builder = agl_fast.BatchBuilder(**OPTIONS)
    builder.add_call("r0", None, 0, [1], [2], reward=0.5)
    batch = builder.finish()
    assert batch.columns["data_id_list"].tolist() == ["r0"]
    assert batch.rollouts[0].reward == 0.5


def triplet(prompt: Any, response: Any, **fields: Any) -> Any:
    return SimpleNamespace(prompt=prompt, response=response, **({"reward": None} | fields))


def test_rollout_from_triplets() -> None:
    triplets = [
        triplet(
            {"token_ids": [1, 2], "raw_content": "…"},
            {"token_ids": [3, 4], "logprobs": [{"logprob": -0.5}, {"logprob": -0.25}]},
            metadata={"response_id": "a", "agent_name": "solver"},
        ),
        triplet(
            {"token_ids": [1, 2, 3, 4]},
            {"token_ids": [5], "logprobs": [-1.0]},
            metadata={"response_id": "b"},
            reward=0.75,
        ),
    ]
    rollout = agl_fast.Rollout.from_triplets("r0", "d0", triplets, status="succeeded")
    assert [call.response_id for call in rollout.calls] == ["a", "b"]
    assert rollout.calls[0].agent == "solver"
    batch = agl_fast.build_batch([rollout], **OPTIONS)
    assert batch.tensors["responses"].tolist() == [[3, 4, 5, 0]]
    assert batch.tensors["rollout_log_probs"].tolist() == [[-0.5, -0.25, -1.0, 0.0]]
    assert (batch.rollouts[0].reward, batch.rollouts[0].status) == (0.75, "succeeded")


@pytest.mark.parametrize(
    ("bad", "error", "named"),
    [
        ({"prompt": {"raw_content": "…"}}, ValueError, "prompt"),
        ({"response": {}}, ValueError, "response"),
        ({"prompt": [1, 2]}, TypeError, "prompt"),
    ],
)
def test_bad_triplets(bad: Any, error: Any, named: str) -> None:
    good = {"prompt": {"token_ids": [1]}, "response": {"token_ids": [2]}, "metadata": {}}
    with pytest.raises(error, match=rf"'r0', triplet 1: {named}"):
        agl_fast.Rollout.from_triplets("r0", "d0", [triplet(**good), triplet(**(good | bad))])


def test_empty_batch_error_crosses_processes() -> None:
    lost = agl_fast.Accounting(sampled=2, truncated=2)
    error = agl_fast.EmptyBatchError("no row", lost, {"training/reward": 0.5})

    copied = pickle.loads(pickle.dumps(error))

    assert type(copied) is agl_fast.EmptyBatchError
    assert (str(copied), copied.accounting) == (str(error), error.accounting)
    assert copied.metrics == {"training/reward": 0.5}


class FreshLists:
    """A call whose lists nobody else keeps."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.log_probs = self.reward = self.response_id = self.finish_reason = None
        self.trainable = True

    @property
    def prompt_ids(self) -> list[int]:
        return [100_000 + i for i in range(50 * (self.n + 1))]

    @property
    def response_ids(self) -> list[int]:
        return [200_000 + self.n]


def test_lists_that_nobody_else_keeps_are_kept() -> None:
    calls = [FreshLists(n) for n in range(10)]
    rollouts = [agl_fast.Rollout(f"r{i}", "d", calls, 1.0) for i in range(20)]
    batch = agl_fast.build_batch(
        rollouts, max_prompt_length=600, max_response_length=8, pad_token_id=0
    )
    rows = batch.tensors["responses"][:, 0].reshape(20, 10)
    assert rows.tolist() == [[200_000 + n for n in range(10)]] * 20


def test_threads_may_add_while_another_finishes() -> None:
    builder = agl_fast.BatchBuilder(max_prompt_length=8, max_response_length=8, pad_token_id=0)
    n_threads, n_each = 3, 200

    def add(thread: int) -> None:
        for i in range(n_each):
            calls = [agl_fast.Call([1, thread], [i])]
            builder.add(agl_fast.Rollout(f"{thread}-{i}", "d", calls, 1.0))

    threads = [threading.Thread(target=add, args=(thread,)) for thread in range(n_threads)]
    for thread in threads:
        thread.start()
    came_back: list[str] = []
    while any(thread.is_alive() for thread in threads) or len(builder):
        if len(builder):
            came_back += [entry.rollout_id for entry in builder.finish().rollouts]
    assert sorted(came_back) == sorted(
        f"{thread}-{i}" for thread in range(n_threads) for i in range(n_each)
    )


def test_tuples_as_data_ids_stay_one_column() -> None:
    rollouts = [agl_fast.Rollout(f"r{i}", ("d", i), [agl_fast.Call([1], [2])]) for i in range(2)]
    batch = agl_fast.build_batch(
        rollouts, max_prompt_length=2, max_response_length=2, pad_token_id=0
    )
    assert batch.columns["data_id_list"].tolist() == [("d", 0), ("d", 1)]


@pytest.mark.parametrize(
    ("response", "metadata"),
    [
        ({}, {"finish_reason": "abort"}),
        ({"raw_content": [{"finish_reason": "abort"}]}, {}),
        ({}, {"response": {"finish_reasons": ["abort"]}}),
    ],
)
def test_an_abort_is_found_where_spans_have_it(response: Any, metadata: Any) -> None:
    triplet = SimpleNamespace(
        prompt={"token_ids": [1]},
        response={"token_ids": [2], "logprobs": None, **response},
        reward=None,
        metadata=metadata,
    )
    rollout = agl_fast.Rollout.from_triplets("r", "d", [triplet])
    assert rollout.calls[0].finish_reason == "abort"


def test_a_log_prob_that_is_missing_is_named() -> None:
    triplet = SimpleNamespace(
        prompt={"token_ids": [1]},
        response={"token_ids": [2], "logprobs": [{"token": "a"}]},
        reward=None,
        metadata={},
    )
    with pytest.raises(ValueError, match=r"rollout 'r', triplet 0: response\['logprobs'\]\[0\]"):
        agl_fast.Rollout.from_triplets("r", "d", [triplet])


def test_the_table_keeps_rewards_and_credits_of_calls():
    calls = [agl_fast.Call([1], [2], credit=0.5), agl_fast.Call([9], [8], reward=1)]
    plain = agl_fast.Call([1], [2])
    rollouts = [agl_fast.Rollout("a", "g", calls), agl_fast.Rollout("b", "g", [plain], 1.0)]
    batch = agl_fast.build_batch(
        rollouts, max_prompt_length=2, max_response_length=2, pad_token_id=0
    )
    rewarded, other = batch.rollouts
    assert (rewarded.call_rewards, rewarded.call_credits) == ((None, 1.0), (0.5, 1.0))
    assert (other.call_rewards, other.call_credits) == (None, None)


@pytest.mark.parametrize(
    "credit", [np.float32(0.5), np.array(0.5), torch.tensor(0.5), Fraction(1, 2)]
)
def test_a_credit_is_any_real_number(credit):
    rollout = agl_fast.Rollout("a", "g", [agl_fast.Call([1], [2], credit=credit)])
    batch = agl_fast.build_batch(
        [rollout], max_prompt_length=1, max_response_length=1, pad_token_id=0
    )
    assert batch.rollouts[0].call_credits == (0.5,)


@pytest.mark.parametrize(
    ("credit", "error"),
    [("1", TypeError), (float("inf"), ValueError), (np.nan, ValueError)],
)
def test_a_wrong_credit_is_named(credit, error):
    rollout = agl_fast.Rollout("a", "g", [agl_fast.Call([1], [2], credit=credit)])
    with pytest.raises(error, match="rollout 'a', call 0: credit"):
        agl_fast.build_batch([rollout], max_prompt_length=2, max_response_length=2, pad_token_id=0)


def test_rewards_and_credits_of_calls_that_are_told_one_by_one():
    builder = agl_fast.BatchBuilder(max_prompt_length=2, max_response_length=2, pad_token_id=0)
    builder.add_call("a", None, 0, [1], [2], reward=0.5, credit=0.25)
    with pytest.raises(ValueError, match="rollout 'a', call 1: credit"):
        builder.add_call("a", None, 0, [9], [8], credit=float("nan"))
    builder.add_call("a", None, 0, [9], [8])
    builder.close_rollout("a", "g", 1.0)
    (entry,) = builder.finish().rollouts
    assert (entry.call_rewards, entry.call_credits) == ((0.5, None), (0.25, 1.0))
    assert (entry.n_calls, entry.reward) == (2, 1.0)
