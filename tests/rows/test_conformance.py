"""Every conformance case and every worked example, in every layout, by both implementations."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agl_fast.rows.accounting import EmptyBatchError
from support.paths import DATA
from support.plain_rollouts import rollout

CASES_FILE = DATA / "cases.jsonl"
CASES = [json.loads(line) for line in CASES_FILE.read_text().splitlines()]
LAYOUTS = [
    pytest.param({}, id="padded"),
    pytest.param({"trim": True}, id="trim"),
    pytest.param({"layout": "jagged"}, id="jagged"),
]
CLASSES = ("sampled", "trained", "truncated", "dropped", "duplicate")

# The table of docs/rows.md: calls, options, rows as (prompt, response, mask, is_drop), counts.
P4_R8 = {"max_prompt_length": 4, "max_response_length": 8}
WORKED_EXAMPLES = [
    pytest.param(
        [([1, 2], [3]), ([1, 2, 3, 7], [4])],
        P4_R8,
        [([1, 2], [3, 7, 4], [1, 0, 1], False)],
        {},
        id="observation",
    ),
    pytest.param(
        [([1, 2], [3, 4]), ([1, 2, 3, 4], [5, 6])],
        P4_R8,
        [([1, 2], [3, 4, 5, 6], [1, 1, 1, 1], False)],
        {},
        id="exact_continuation",
    ),
    pytest.param(
        [([1, 2, 3], [4, 5], {"response_id": "a"}), ([1, 2, 3], [4, 5], {"response_id": "a"})],
        P4_R8,
        [([1, 2, 3], [4, 5], [1, 1], False)],
        {"duplicate": 2},
        id="recorded_twice",
    ),
    pytest.param(
        [([1, 2], [3], {"response_id": "a"}), ([1, 2], [4, 5], {"response_id": "a"})],
        P4_R8,
        [([1, 2], [3], [1], False), ([1, 2], [4, 5], [1, 1], False)],
        {"response_id_clashes": 1},
        id="one_response_id_twice",
    ),
    pytest.param(
        [([1, 2, 3], [4]), ([1, 2, 3], [4, 5, 6])],
        P4_R8,
        [([1, 2, 3], [4], [1], False), ([1, 2, 3], [4, 5, 6], [1, 1, 1], False)],
        {},
        id="retry",
    ),
    pytest.param(
        [([1], [2]), ([50], [51]), ([1, 2, 3], [4]), ([50, 51, 52], [53])],
        P4_R8,
        [([1], [2, 3, 4], [1, 0, 1], False), ([50], [51, 52, 53], [1, 0, 1], False)],
        {},
        id="interleaved",
    ),
    pytest.param(
        [([1, 2], [3]), ([*range(7, 13)], [13, 14]), ([*range(7, 16)], [16])],
        P4_R8,
        [
            ([1, 2], [3], [1], False),
            ([7, 8, 9, 10], [11, 12, 13, 14, 15, 16], [0, 0, 1, 1, 0, 1], False),
        ],
        {},
        id="spilled_and_continued",
    ),
    pytest.param(
        [([1], [2]), ([1, 2, 3, 3, 3, 3, 3, 3], [4])],
        {"max_prompt_length": 4, "max_response_length": 4},
        [([1], [2], [1], False)],
        {"truncated": 1},
        id="cut_in_an_observation",
    ),
    pytest.param([([1, 2], [])], P4_R8, [], {"empty_calls": 1}, id="empty_response"),
    pytest.param(
        [([1, 2, 3, 4, 5], [6])],
        P4_R8,
        [([1, 2, 3, 4], [5, 6], [0, 1], False)],
        {},
        id="spilled",
    ),
    pytest.param(
        [([1, 2, 3, 4, 5], [6])],
        P4_R8 | {"overlong_prompt": "drop"},
        [([1, 2, 3, 4], [6], [1], True)],
        {"dropped": 1},
        id="overlong_dropped",
    ),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_case(build: Any, case: dict[str, Any], layout: dict[str, Any]) -> None:
    options = {
        "max_prompt_length": case["P"],
        "max_response_length": case["R"],
        "max_total_length": case.get("total"),
        "level": case.get("level", "trajectory"),
        "overlong_prompt": case.get("overlong_prompt"),
        "pad_token_id": case.get("pad", 0),
        **layout,
    }
    expected = [tuple(row) for row in case["rows"]]
    accounting = check_rows(build, case["calls"], options, expected)
    assert {name: getattr(accounting, name) for name in CLASSES} == case["accounting"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("calls", "limits", "expected", "counts"), WORKED_EXAMPLES)
def test_worked_example(
    build: Any, calls: Any, limits: Any, expected: Any, counts: Any, layout: dict[str, Any]
) -> None:
    options = {"pad_token_id": 0, **limits, **layout}
    accounting = check_rows(build, calls, options, expected)
    names = ("truncated", "dropped", "duplicate", "empty_calls", "empty_rows")
    for name in (*names, "response_id_clashes"):
        assert getattr(accounting, name) == counts.get(name, 0), name


def check_rows(build: Any, calls: Any, options: dict[str, Any], expected: list[Any]) -> Any:
    """The accounting of the batch of one rollout, once it has the expected rows."""
    one = rollout(*calls, reward=0.5)
    if not expected:
        with pytest.raises(EmptyBatchError) as raised:
            build([one], **options)
        return raised.value.accounting

    batch = build([one], **options)
    rows = [
        (prompt, response, mask, is_drop)
        for (prompt, response, mask, scores, is_drop) in unpadded_rows(batch, options)
    ]
    assert rows == expected
    for _, _, mask, scores, _ in unpadded_rows(batch, options):
        assert mask[-1] == 1
        assert scores == [0.0] * (len(mask) - 1) + [0.5]
    return batch.accounting


def unpadded_rows(batch: Any, options: dict[str, Any]) -> list[Any]:
    tensors = batch.tensors
    rows = []
    for index, is_drop in enumerate(tensors["is_drop_mask"]):
        prompt, response, mask, scores = (
            tensors[key][index]
            for key in ("prompts", "responses", "response_mask", "token_level_scores")
        )
        if "attention_mask" in tensors:
            attention = tensors["attention_mask"][index]
            n_prompt = sum(attention[: len(prompt)])
            n_response = sum(attention[len(prompt) :])
            pad = options["pad_token_id"]
            assert attention == (
                [0] * (len(prompt) - n_prompt)
                + [1] * (n_prompt + n_response)
                + [0] * (len(response) - n_response)
            )
            assert prompt[: len(prompt) - n_prompt] == [pad] * (len(prompt) - n_prompt)
            assert response[n_response:] == [pad] * (len(response) - n_response)
            assert not any(mask[n_response:])
            assert not any(scores[n_response:])
            prompt = prompt[len(prompt) - n_prompt :]
            response, mask, scores = (values[:n_response] for values in (response, mask, scores))
        rows.append((prompt, response, mask, scores, is_drop))
    return rows
