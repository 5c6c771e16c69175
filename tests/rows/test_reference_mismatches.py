"""Calls that extend no chain, and why, as docs/rows.md tells them apart."""

from __future__ import annotations

from typing import Any

import pytest

from agl_fast.rows.accounting import Mismatch
from support.plain_rollouts import rollout
from support.simulated_agents import Tokenizer

OPTIONS = {"max_prompt_length": 4, "max_response_length": 8, "pad_token_id": 0, "trim": True}


@pytest.mark.parametrize(
    ("calls", "index", "kind"),
    [
        pytest.param([([1, 2], [3, 4]), ([1, 2, 3], [5])], 3, "shortened", id="shortened"),
        pytest.param([([1, 2], [3]), ([1, 2], [4])], 2, "shortened", id="retry"),
        pytest.param([([1, 2], [3]), ([1, 9, 9], [4])], 1, "new_conversation", id="new"),
        pytest.param([([1, 2], [3]), ([9], [4])], 0, "new_conversation", id="nothing_shared"),
        pytest.param([([1, 2], [3]), ([1, 2, 9], [4])], 2, "history_rewritten", id="response"),
        pytest.param(
            [([1], [2]), ([1, 2, 3, 4], [5]), ([1, 2, 3, 9, 5, 6], [7])],
            3,
            "history_rewritten",
            id="between_responses",
        ),
    ],
)
def test_mismatch_kinds(build: Any, calls: Any, index: int, kind: str) -> None:
    batch = build([rollout(*calls, rollout_id="r5")], **OPTIONS)
    assert batch.mismatches == [Mismatch("r5", len(calls) - 1, index, kind)]


@pytest.mark.parametrize(
    ("calls", "kind"),
    [
        # 0 spells "a" and 4 "aa"; 3 is one character, 1 and 2 its halves.
        pytest.param([([9], [0, 0]), ([9, 4, 7], [5])], "retokenised", id="joined"),
        pytest.param([([9], [4]), ([9, 0, 0, 7], [5])], "retokenised", id="split"),
        pytest.param([([9], [3]), ([9, 1, 2, 7], [5])], "retokenised", id="halves_of_a_character"),
        pytest.param([([9], [1]), ([9, 3, 7], [5])], "retokenised", id="cut_character"),
        pytest.param([([4, 9], [8]), ([0, 0, 9, 8], [5])], "retokenised", id="in_the_prompt"),
        pytest.param([([9], [0, 0]), ([9, 3, 7], [5])], "history_rewritten", id="other_text"),
        pytest.param([([9], [4, 3]), ([9, 0], [5])], "history_rewritten", id="less_text"),
        pytest.param([([4], [9]), ([3], [9])], "new_conversation", id="other_prompt"),
        pytest.param([([9], [4, 0]), ([9, 4], [5])], "shortened", id="shortened"),
    ],
)
def test_mismatch_kinds_with_a_tokenizer(build: Any, calls: Any, kind: str) -> None:
    batch = build([rollout(*calls)], tokenizer=Tokenizer(), **OPTIONS)
    assert [mismatch.kind for mismatch in batch.mismatches] == [kind]


def test_a_mismatch_is_told_of_the_closest_chain(build: Any) -> None:
    calls = [([1, 2, 3], [4]), ([1, 7], [8]), ([1, 2, 3, 5], [6])]
    batch = build([rollout(*calls)], **OPTIONS)
    assert batch.mismatches[1] == Mismatch("r0", 2, 3, "history_rewritten")


def test_of_equally_close_chains_the_one_extended_last_tells_the_kind(build: Any) -> None:
    # Both share [1, 2] with the last prompt; in the first chain that is its prompt and answer.
    calls = [([1], [2, 3]), ([1, 2, 4], [5])]
    last = ([1, 2, 6], [7])
    kinds = {
        "second": build([rollout(*calls, last)], **OPTIONS).mismatches[-1].kind,
        "first": build([rollout(*calls, ([1, 2, 3], [9]), last)], **OPTIONS).mismatches[-1].kind,
    }
    assert kinds == {"second": "new_conversation", "first": "history_rewritten"}


def test_transitions_report_no_mismatch(build: Any) -> None:
    batch = build([rollout(([1], [2]), ([3], [4]))], level="transition", **OPTIONS)
    assert batch.mismatches == []


# A chat template that puts 8, 9 before an answer and leaves it out of the history.
@pytest.mark.parametrize(
    ("calls", "kind"),
    [
        pytest.param([([1, 8, 9], [3, 4]), ([1, 3, 4, 2, 8, 9], [5])], True, id="left_out"),
        pytest.param([([1, 8, 9], [3, 4]), ([1, 8, 7, 3, 4, 2], [5])], True, id="another"),
        pytest.param([([1, 8, 9], [6, 7, 3, 4]), ([1, 3, 4, 2, 8, 9], [5])], True, id="reasoning"),
        pytest.param([([1, 8, 9], [3, 4]), ([1, 5, 5, 2, 8, 9], [5])], False, id="other_answer"),
        pytest.param([([8, 9], [3, 4]), ([3, 4, 2, 8, 9], [5])], False, id="nothing_shared"),
        pytest.param(
            [([1, *[8] * 32, 9], [3, 4]), ([1, 3, 4, 2, 8, 9], [5])], False, id="too_long"
        ),
        pytest.param(
            [([1], [2]), ([1, 2, 7, 8, 9], [3]), ([1, 2, 7, 3, 6], [5])], True, id="later_answer"
        ),
    ],
)
def test_a_generation_prompt_that_the_history_leaves_out(
    build: Any, calls: Any, kind: bool
) -> None:
    options = OPTIONS | {"max_prompt_length": 64}
    (mismatch,) = build([rollout(*calls)], **options).mismatches
    assert (mismatch.kind == "generation_prompt") is kind


def test_every_call_of_a_conversation_without_thinking(build: Any) -> None:
    """As Qwen3 with thinking off: an empty think block before every answer, none in the history."""
    user, empty_think, end = [1, 2], [7, 8, 9], 5
    history: list[int] = []
    calls = []
    for turn in range(6):
        history += [*user, 10 + turn, 3]
        answer = [20 + turn, 30 + turn, end]
        calls.append(([*history, *empty_think], answer))
        history += answer
    options = OPTIONS | {"max_prompt_length": 64}
    batch = build([rollout(*calls)], **options)
    assert [mismatch.kind for mismatch in batch.mismatches] == ["generation_prompt"] * 5
