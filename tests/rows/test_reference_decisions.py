"""One test per decision of docs/rows.md that the conformance cases do not show."""

from __future__ import annotations

from typing import Any

import pytest

from agl_fast.rows.accounting import DROP_REASONS, EmptyBatchError
from support.plain_rollouts import rollout

OPTIONS = {"max_prompt_length": 4, "max_response_length": 8, "pad_token_id": 0, "trim": True}
NAN = float("nan")


def responses(batch: Any) -> list[list[int]]:
    """Without padding; the tests below use no token 0."""
    return [[token for token in row if token] for row in batch.tensors["responses"]]


def reward_and_scores(batch: Any) -> tuple[float, list[float]]:
    return batch.rollouts[0].reward, [sum(row) for row in batch.tensors["token_level_scores"]]


# Classes


def test_a_duplicate_of_an_aborted_call_is_a_duplicate(build: Any) -> None:
    aborted = {"response_id": "a", "finish_reason": "abort"}
    batch = build(
        [rollout(([1], [2, 3], aborted), ([1], [2, 3], {"response_id": "a"}), ([1], [4]))],
        **OPTIONS,
    )
    assert responses(batch) == [[4]]
    assert batch.accounting.duplicate == 2
    assert batch.accounting.dropped_by_reason["aborted"] == 2


def test_aborted_comes_before_excluded_and_excluded_before_empty(build: Any) -> None:
    batch = build(
        [
            rollout(
                ([1], [2], {"finish_reason": "abort", "trainable": False}),
                ([], [2, 2], {"trainable": False}),
                ([], [3, 3, 3]),
                ([1], [4]),
            )
        ],
        **OPTIONS,
    )
    assert batch.accounting.dropped_by_reason == {
        **dict.fromkeys(DROP_REASONS, 0),
        "aborted": 1,
        "excluded": 2,
        "empty": 3,
    }
    assert batch.accounting.empty_calls == 1


def test_a_response_id_belongs_to_its_rollout(build: Any) -> None:
    one = ([1], [2], {"response_id": "a"})
    batch = build([rollout(one, rollout_id="r0"), rollout(one, rollout_id="r1")], **OPTIONS)
    assert batch.accounting.duplicate == 0
    assert batch.columns["rollout_id_list"] == ["r0", "r1"]


def test_a_dropped_call_is_no_context_to_extend(build: Any) -> None:
    batch = build(
        [rollout(([1], [2], {"finish_reason": "abort"}), ([1, 2, 3], [4]))],
        **OPTIONS,
    )
    assert responses(batch) == [[4]]
    assert batch.mismatches == []


# One row rule at every level


def test_transition_may_spill(build: Any) -> None:
    batch = build(
        [rollout(([1, 2, 3, 4, 5], [6]))], level="transition", overlong_prompt="spill", **OPTIONS
    )
    assert responses(batch) == [[5, 6]]
    assert batch.tensors["response_mask"] == [[0, 1]]
    assert batch.tensors["is_drop_mask"] == [False]


def test_total_length_counts_the_kept_prompt_of_an_overlong_one(build: Any) -> None:
    batch = build(
        [rollout(([1, 2, 3, 4, 5], [6, 7, 8]))],
        overlong_prompt="drop",
        max_total_length=6,
        **OPTIONS,
    )
    assert responses(batch) == [[6, 7]]


def test_total_length_no_longer_than_the_prompt_leaves_no_row(build: Any) -> None:
    with pytest.raises(EmptyBatchError) as raised:
        build([rollout(([1, 2, 3], [4, 5]))], max_total_length=2, **OPTIONS)
    assert raised.value.accounting.truncated == 2
    assert raised.value.accounting.empty_rows == 1


def test_spilled_tokens_take_room_in_the_response(build: Any) -> None:
    options = OPTIONS | {"max_response_length": 3}
    batch = build([rollout(([1, 2, 3, 4, 5, 6], [7, 8]))], **options)
    assert responses(batch) == [[5, 6, 7]]
    assert batch.accounting.truncated == 1


# Marked rows


def test_a_marked_chain_drops_its_truncated_tokens_too(build: Any) -> None:
    options = OPTIONS | {"max_response_length": 2}
    batch = build([rollout(([1, 2, 3, 4, 5], [6, 7, 8]))], overlong_prompt="drop", **options)
    assert batch.accounting.dropped_by_reason["overlong_prompt"] == 3
    assert batch.accounting.truncated == 0
    assert not batch.rollouts[0].truncated


def test_a_marked_chain_without_room_gives_no_row_and_drops_its_tokens(build: Any) -> None:
    with pytest.raises(EmptyBatchError) as raised:
        build(
            [rollout(([1, 2, 3, 4, 5], [6, 7]))],
            overlong_prompt="drop",
            max_total_length=4,
            **OPTIONS,
        )
    assert raised.value.accounting.dropped_by_reason["overlong_prompt"] == 2
    assert raised.value.accounting.empty_rows == 1


def test_a_batch_of_marked_rows_is_a_batch(build: Any) -> None:
    batch = build([rollout(([1, 2, 3, 4, 5], [6]))], overlong_prompt="drop", **OPTIONS)
    assert batch.tensors["is_drop_mask"] == [True]
    assert batch.accounting.trained == 0


def test_a_marked_row_carries_its_reward(build: Any) -> None:
    batch = build([rollout(([1, 2, 3, 4, 5], [6]), reward=2.0)], overlong_prompt="drop", **OPTIONS)
    assert batch.tensors["token_level_scores"] == [[2.0]]


# Truncated rollouts

TRUNCATED = rollout(([1], [2]), ([5], [6, 7, 8]), ([9, 9, 9], [3, 3]), reward=1.0)
R2 = OPTIONS | {"max_response_length": 2}


def test_train_keeps_a_truncated_rollout(build: Any) -> None:
    batch = build([TRUNCATED], **R2)
    assert batch.rollouts[0].truncated
    assert batch.tensors["is_drop_mask"] == [False, False, False]
    assert batch.accounting.trained == 5
    assert batch.accounting.truncated == 1


def test_mask_marks_every_row_of_a_truncated_rollout_and_no_other(build: Any) -> None:
    batch = build(
        [TRUNCATED, rollout(([1], [2]), rollout_id="r1")], truncated_rollouts="mask", **R2
    )
    assert batch.tensors["is_drop_mask"] == [True, True, True, False]
    assert batch.accounting.dropped_by_reason["truncated_rollout"] == 6
    assert batch.accounting.truncated == 0
    assert batch.accounting.trained == 1


def test_mask_leaves_the_tokens_of_chains_without_a_row_truncated(build: Any) -> None:
    one = rollout(([1], [2]), ([3] * 6, [5, 6, 7]))
    batch = build([one], truncated_rollouts="mask", **R2)
    assert batch.tensors["is_drop_mask"] == [True]
    assert batch.accounting.dropped_by_reason["truncated_rollout"] == 1
    assert batch.accounting.truncated == 3
    assert batch.accounting.empty_rows == 1


def test_mask_keeps_the_reason_of_an_overlong_chain(build: Any) -> None:
    one = rollout(([1, 2, 3, 4, 5], [6]), ([7], [8, 8, 8]))
    batch = build([one], truncated_rollouts="mask", overlong_prompt="drop", **R2)
    assert batch.accounting.dropped_by_reason["overlong_prompt"] == 1
    assert batch.accounting.dropped_by_reason["truncated_rollout"] == 3


def test_zero_reward_takes_the_reward_of_a_truncated_rollout(build: Any) -> None:
    batch = build([TRUNCATED], truncated_rollouts="zero_reward", **R2)
    assert reward_and_scores(batch) == (0.0, [0.0, 0.0, 0.0])
    assert batch.rollouts[0].has_reward
    assert batch.accounting.trained == 5


# Rewards


@pytest.mark.parametrize(
    ("reward", "of_calls", "expected"),
    [
        pytest.param(0.5, [1.0, 2.0], (0.5, True), id="given"),
        pytest.param(True, [None, None], (1.0, True), id="true"),
        pytest.param(False, [1.0, None], (0.0, True), id="false_is_a_reward"),
        pytest.param(None, [1.0, 2.0], (2.0, True), id="last_of_the_calls"),
        pytest.param(None, [1.0, None], (1.0, True), id="last_that_is_not_missing"),
        pytest.param(NAN, [1.0, NAN], (1.0, True), id="nan_is_missing"),
        pytest.param(None, [True, None], (1.0, True), id="bool_of_a_call"),
        pytest.param(None, [None, None], (-3.0, False), id="filled"),
        pytest.param(NAN, [NAN, None], (-3.0, False), id="nan_filled"),
    ],
)
def test_final_reward(build: Any, reward: Any, of_calls: Any, expected: Any) -> None:
    calls = [([1], [2], {"reward": of_calls[0]}), ([1, 2], [3], {"reward": of_calls[1]})]
    batch = build([rollout(*calls, reward=reward)], reward_fillna_value=-3.0, **OPTIONS)
    entry = batch.rollouts[0]
    assert (entry.reward, entry.has_reward) == expected
    assert batch.tensors["token_level_scores"] == [[0.0, expected[0]]]


def test_a_dropped_call_may_hold_the_reward(build: Any) -> None:
    judge = ([9], [9], {"trainable": False, "reward": 0.25})
    batch = build([rollout(([1], [2]), judge)], **OPTIONS)
    assert reward_and_scores(batch) == (0.25, [0.25])


@pytest.mark.parametrize("infinity", [float("inf"), float("-inf")])
def test_an_infinite_reward_is_an_error(build: Any, infinity: float) -> None:
    with pytest.raises(ValueError, match="r-inf"):
        build([rollout(([1], [2]), reward=infinity, rollout_id="r-inf")], **OPTIONS)
    with pytest.raises(ValueError, match="r-inf"):
        build([rollout(([1], [2], {"reward": infinity}), rollout_id="r-inf")], **OPTIONS)


# Log-probs


def test_a_row_has_log_probs_when_every_trained_token_has_one(build: Any) -> None:
    known, unknown = {"log_probs": [-0.5]}, {}
    batch = build(
        [
            rollout(([1], [2], known), ([1, 2, 3], [4], known), rollout_id="all"),
            rollout(([1], [2], known), ([1, 2, 3], [4], unknown), rollout_id="one"),
            rollout(([1], [2], unknown), rollout_id="none"),
        ],
        **OPTIONS,
    )
    assert batch.columns["has_rollout_log_probs"] == [True, False, False]
    assert batch.tensors["rollout_log_probs"] == [[-0.5, 0, -0.5], [-0.5, 0, 0], [0, 0, 0]]


def test_log_probs_that_were_cut_away_do_not_count(build: Any) -> None:
    one = rollout(([1], [2], {"log_probs": [-0.5]}), ([1, 2, 3], [4]))
    assert build([one], **OPTIONS | {"max_response_length": 1}).columns[
        "has_rollout_log_probs"
    ] == [True]
    late = rollout(([1], [2]), ([1, 2, 3], [4], {"log_probs": [-0.5]}))
    cut = build([late], **OPTIONS | {"max_response_length": 2})
    assert "rollout_log_probs" not in cut.tensors
    assert cut.columns["has_rollout_log_probs"] == [False]


def test_no_log_probs_no_key(build: Any) -> None:
    assert "rollout_log_probs" not in build([rollout(([1], [2]))], **OPTIONS).tensors


# Columns and entries


def test_columns_of_a_trajectory(build: Any) -> None:
    one = rollout(([1], [2], {"finish_reason": "abort"}), ([1], [2]), ([5], [6]), ([1, 2, 3], [4]))
    batch = build([one], call_index=True, **OPTIONS)
    assert batch.columns == {
        "data_id_list": ["d0", "d0"],
        "rollout_id_list": ["r0", "r0"],
        "first_call_index_list": [1, 2],
        "has_rollout_log_probs": [False, False],
    }
    assert batch.tensors["call_index"] == [[1, -1, 3], [2, -1, -1]]


def test_columns_of_transitions(build: Any) -> None:
    one = rollout(([1], []), ([1], [2]), ([1, 2, 3], [4]))
    batch = build([one], level="transition", **OPTIONS)
    assert batch.columns["turn_index_list"] == [1, 2]
    assert batch.columns["first_call_index_list"] == [1, 2]


def test_rows_stand_in_the_order_of_first_calls_and_rollouts(build: Any) -> None:
    first = rollout(([1], [2]), ([5], [6]), ([1, 2], [3]), rollout_id="r1", data_id="d1")
    second = rollout(([8], [9]), rollout_id="r0", data_id="d0")
    batch = build([first, second], **OPTIONS)
    assert responses(batch) == [[2, 3], [6], [9]]
    assert batch.columns["rollout_id_list"] == ["r1", "r1", "r0"]


def test_a_rollout_without_rows_has_an_entry(build: Any) -> None:
    silent = rollout(rollout_id="silent", data_id="d7", reward=1.5, status="failed")
    lost = rollout(([1], []), rollout_id="lost", reward=None)
    batch = build([silent, rollout(([1], [2])), lost], **OPTIONS)
    entries = {entry.rollout_id: entry for entry in batch.rollouts}
    assert list(entries) == ["silent", "r0", "lost"]
    assert (entries["silent"].n_calls, entries["silent"].n_rows) == (0, 0)
    assert (entries["silent"].reward, entries["silent"].status) == (1.5, "failed")
    assert entries["silent"].data_id == "d7"
    assert entries["lost"].accounting.empty_calls == 1
    assert not entries["lost"].has_reward


def test_no_rows_at_all_is_an_error_with_accounting(build: Any) -> None:
    aborted = {"finish_reason": "abort"}
    with pytest.raises(EmptyBatchError) as raised:
        build([rollout(), rollout(([1], [2, 2], aborted), rollout_id="r1")], **OPTIONS)
    assert raised.value.accounting.dropped_by_reason["aborted"] == 2


# Widths


def test_trim_takes_the_longest_prompt_and_response_after_the_cut(build: Any) -> None:
    rollouts = [
        rollout(([1, 2, 3], [4]), rollout_id="long_prompt"),
        rollout(([1], [2]), ([1, 2, 9, 9, 9, 9, 9, 9], [4, 4]), rollout_id="cut"),
    ]
    trimmed = build(rollouts, **OPTIONS | {"max_response_length": 5})
    assert trimmed.tensors["prompts"] == [[1, 2, 3], [0, 0, 1]]
    assert trimmed.tensors["responses"] == [[4], [2]]
    wide = build(rollouts, **OPTIONS | {"trim": False})
    assert [len(row) for row in wide.tensors["prompts"]] == [4, 4]
    assert [len(row) for row in wide.tensors["responses"]] == [8, 8]


def test_position_ids_go_on_counting_past_nothing(build: Any) -> None:
    batch = build([rollout(([1, 2], [3, 4]))], **OPTIONS | {"trim": False})
    assert batch.tensors["position_ids"] == [[0, 0, 0, 1, 2, 3, 3, 3, 3, 3, 3, 3]]


def test_a_call_cut_away_still_counts_as_context(build: Any) -> None:
    calls = [([1], [2, 3, 4]), ([1, 2, 3, 4, 5], [6])]
    batch = build([rollout(*calls)], **OPTIONS | {"max_response_length": 2})
    assert responses(batch) == [[2, 3]]
    assert batch.mismatches == []
    assert batch.accounting.truncated == 2
