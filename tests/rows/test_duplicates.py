"""A call is a duplicate when its response id, prompt ids and response ids were recorded before."""

from __future__ import annotations

from typing import Any

import pytest

import agl_fast
from agl_fast.recording import RecordingWriter, read_recording
from agl_fast.rows.levels import LevelName
from support.batch_lists import as_lists, assert_same
from support.implementations import BUILDS
from support.plain_rollouts import PlainRollout, rollout, to_native

LEVELS = ("transition", "trajectory", "tree")
LIMITS: dict[str, Any] = {"max_prompt_length": 8, "max_response_length": 8, "pad_token_id": 0}
A, B = {"response_id": "a"}, {"response_id": "b"}

# Calls; then tokens trained, duplicate, and response_id clashes, at every level.
CASES = [
    pytest.param([([1, 2], [3], A), ([1, 2], [4, 5], A)], (3, 0, 1), id="other_response"),
    pytest.param([([1, 2], [3], A), ([1, 7], [3], A)], (2, 0, 1), id="other_prompt"),
    pytest.param([([1, 2], [3, 4], A), ([1, 2], [3, 5], A)], (4, 0, 1), id="same_lengths"),
    pytest.param([([1, 2], [3, 4], A), ([1, 2, 3], [4], A)], (3, 0, 1), id="same_context"),
    pytest.param([([1, 2], [3, 4], A), ([1, 2], [3, 4], A)], (2, 2, 0), id="recorded_twice"),
    pytest.param([([1, 2], [3, 4], A), ([1, 2], [3, 4], B)], (4, 0, 0), id="other_id"),
    pytest.param([([1, 2], [3]), ([1, 2], [3])], (2, 0, 0), id="no_id"),
    pytest.param(
        [([1, 2], [3], {"response_id": ""}), ([1, 2], [3], {"response_id": ""})],
        (2, 0, 0),
        id="empty_id",
    ),
    pytest.param(
        [([1, 2], [3], A), ([1, 2], [4, 5], A), ([1, 2], [3], A), ([1, 2], [4, 5], A)],
        (3, 3, 1),
        id="both_recorded_twice",
    ),
    pytest.param(
        [([1, 2], [3], A | {"log_probs": [-0.5]}), ([1, 2], [3], A | {"log_probs": [-0.75]})],
        (1, 1, 0),
        id="log_probs_do_not_matter",
    ),
    pytest.param([([1, 2], [], A), ([1, 2], [3], A)], (1, 0, 1), id="clash_with_an_empty_call"),
    pytest.param([([1, 2], [], A), ([1, 2], [], A), ([1], [2])], (1, 0, 0), id="empty_twice"),
    pytest.param(
        [([1, 2], [3, 4], A | {"finish_reason": "abort"}), ([1, 2], [3, 5], A)],
        (2, 0, 1),
        id="clash_with_an_aborted_call",
    ),
    pytest.param(
        [([1, 2], [3, 4], A | {"trainable": False}), ([1, 2], [3, 4], A), ([1], [2])],
        (1, 2, 0),
        id="excluded_call_recorded_twice",
    ),
]


def counts_of(accounting: Any) -> tuple[int, int, int]:
    return accounting.trained, accounting.duplicate, accounting.response_id_clashes


def sampled_by(calls: list[Any]) -> int:
    return sum(len(call[1]) for call in calls)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(("calls", "expected"), CASES)
def test_duplicates_and_clashes(build: str, calls: Any, expected: Any, level: LevelName) -> None:
    accounting = BUILDS[build]([rollout(*calls)], level=level, **LIMITS).accounting
    assert counts_of(accounting) == expected
    assert accounting.sampled == sampled_by(calls)
    assert accounting.sampled == accounting.trained + accounting.dropped + accounting.duplicate


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("keep", [0, 1, 2])
@pytest.mark.parametrize(("calls", "expected"), CASES)
def test_calls_that_come_one_by_one(calls: Any, expected: Any, keep: int, level: LevelName) -> None:
    """The prompt is coded as a difference to the call before: the whole prompt is compared."""
    plain = rollout(*calls, rollout_id="r0", data_id="r0")
    builder = agl_fast.BatchBuilder(level=level, **LIMITS)
    before: list[int] = []
    for index, call in enumerate(plain.calls):
        shared = min(keep, len(before), len(call.prompt_ids))
        while before[:shared] != call.prompt_ids[:shared]:
            shared -= 1
        builder.add_call(
            "r0",
            index - 1 if shared else None,
            shared,
            call.prompt_ids[shared:],
            call.response_ids,
            call.log_probs,
            response_id=call.response_id,
            finish_reason=call.finish_reason,
            trainable=call.trainable,
        )
        before = call.context
    batch = builder.finish()
    assert counts_of(batch.accounting) == expected
    assert_same(as_lists(batch), BUILDS["reference"]([plain], level=level, **LIMITS))


def test_a_response_id_of_another_rollout_is_another() -> None:
    both = [rollout(([1], [2], A), rollout_id=name) for name in ("r0", "r1")]
    batch = agl_fast.build_batch([to_native(each) for each in both], **LIMITS)
    assert counts_of(batch.accounting) == (2, 0, 0)


@pytest.mark.parametrize("response_id", [0, 7, "é", "a" * 1000])
def test_any_response_id(response_id: Any) -> None:
    calls = [agl_fast.Call([1], [n], response_id=response_id) for n in (2, 3, 2)]
    batch = agl_fast.build_batch([agl_fast.Rollout("r", "d", calls)], **LIMITS)
    assert counts_of(batch.accounting) == (2, 1, 1)


def test_ids_are_compared_whatever_holds_them() -> None:
    import numpy as np
    import torch

    calls = [
        agl_fast.Call([1, 2], (3,), response_id="a"),
        agl_fast.Call(np.array([1, 2], np.int32), torch.tensor([3]), response_id="a"),
        agl_fast.Call(np.array([1, 2]), torch.tensor([4], dtype=torch.int32), response_id="a"),
    ]
    batch = agl_fast.build_batch([agl_fast.Rollout("r", "d", calls)], **LIMITS)
    assert counts_of(batch.accounting) == (2, 1, 1)
    assert batch.metrics["training/response_id_clashes"] == 1
    assert batch.metrics["training/tokens/duplicate"] == 1


def test_one_id_for_a_whole_conversation() -> None:
    """An agent that names its conversation in every request: no answer is taken for another."""
    calls, prompt = [], [1]
    for turn in range(20):
        calls.append(agl_fast.Call(prompt, [100 + turn] * 7, response_id="conv-7"))
        prompt = [*prompt, *calls[-1].response_ids, 2]
    whole = agl_fast.Rollout("r", "d", calls)
    batch = agl_fast.build_batch([whole], **LIMITS | {"max_response_length": 1000})
    assert (batch.accounting.sampled, *counts_of(batch.accounting)) == (140, 140, 0, 19)
    assert len(batch) == 1


def test_a_wrong_call_with_a_known_id_leaves_the_rollout_as_it_was() -> None:
    builder = agl_fast.BatchBuilder(**LIMITS)
    builder.add_call("r", None, 0, [1], [2], response_id="a")
    with pytest.raises(ValueError, match=r"response_ids\[1\] is -1"):
        builder.add_call("r", 0, 1, [], [2, -1], response_id="a")
    builder.add_call("r", 0, 1, [], [2], response_id="a")
    builder.add_call("r", 0, 2, [], [3], response_id="a")
    assert counts_of(builder.finish().accounting) == (2, 1, 1)


def test_recordings_keep_what_tells_them_apart(tmp_path: Any) -> None:
    plain: PlainRollout = rollout(([1, 2], [3], A), ([1, 2], [4, 5], A), ([1, 2], [3], A))
    file = tmp_path / "rollouts.jsonl"
    with RecordingWriter(file) as writer:
        writer.write(to_native(plain))
    batch = agl_fast.build_batch(read_recording(file).rollouts, **LIMITS)
    assert counts_of(batch.accounting) == (3, 1, 1)


def test_shares_of_finish_reasons() -> None:
    reasons = ["length", "length", "stop", "tool_calls", "repetition", None, "abort", "length"]
    calls = [agl_fast.Call([1], [n], finish_reason=reason) for n, reason in enumerate(reasons)]
    batch = agl_fast.build_batch([agl_fast.Rollout("r", "d", calls)], **LIMITS)
    shares = {
        name.rpartition("/")[2]: value
        for name, value in batch.metrics.items()
        if name.startswith("training/finish_reason/")
    }
    assert shares == {
        "stop": 1 / 8,
        "length": 3 / 8,
        "tool_calls": 1 / 8,
        "abort": 1 / 8,
        "repetition": 1 / 8,
        "none": 1 / 8,
    }
