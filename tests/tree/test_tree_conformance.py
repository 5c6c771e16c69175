"""Every conformance case of docs/tree.md, in every layout, by both implementations."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agl_fast.rows.accounting import EmptyBatchError
from support.paths import DATA
from support.plain_rollouts import rollout

CASES_FILE = DATA / "tree_cases.jsonl"
CASES = [json.loads(line) for line in CASES_FILE.read_text().splitlines()]
OPTIONS: dict[str, Any] = {
    "level": "tree",
    "max_prompt_length": 1,
    "max_response_length": 1,
    "pad_token_id": 99,
    "call_index": True,
}
REWARD = 0.5


@pytest.mark.parametrize("layout", ["padded", "jagged"])
@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_case(build: Any, case: dict[str, Any], layout: str) -> None:
    options = OPTIONS | {"layout": layout, "tree_max_tokens": case.get("max_tokens", 16384)}
    one = rollout(*case["calls"], reward=REWARD)
    if case["rows"]:
        batch = build([one], **options)
        expected = padded(case["rows"]) if layout == "padded" else jagged(case["rows"])
        assert batch.tensors == expected
        assert batch.columns["first_call_index_list"] == [row[3][0] for row in case["rows"]]
        assert "turn_index_list" not in batch.columns
        (entry,) = batch.rollouts
        assert entry.n_rows == len(case["rows"])
        assert not entry.truncated
        assert batch.mismatches == []
        accounting = batch.accounting
    else:
        with pytest.raises(EmptyBatchError) as raised:
            build([one], **options)
        accounting = raised.value.accounting
    counted = {name: getattr(accounting, name) for name in case["accounting"]}
    assert counted == case["accounting"]
    assert accounting.truncated == 0


def jagged(rows: list[Any]) -> dict[str, Any]:
    return {
        "prompts": [prompt for prompt, _, _, _ in rows],
        "responses": [response for _, response, _, _ in rows],
        "input_ids": [prompt + response for prompt, response, _, _ in rows],
        "position_ids": [depth for _, _, depth, _ in rows],
        "response_mask": [[int(call != -1) for call in calls] for _, _, _, calls in rows],
        "call_index": [calls for _, _, _, calls in rows],
        "token_level_scores": [[0.0] * (len(calls) - 1) + [REWARD] for _, _, _, calls in rows],
        "is_drop_mask": [False] * len(rows),
    }


def padded(rows: list[Any]) -> dict[str, Any]:
    """As wide as the longest prompt and response; padding repeats the last position."""
    pad = OPTIONS["pad_token_id"]
    p = max(len(prompt) for prompt, _, _, _ in rows)
    r = max(len(response) for _, response, _, _ in rows)
    tensors: dict[str, Any] = {name: [] for name in jagged(rows)} | {"attention_mask": []}
    for prompt, response, depth, calls in rows:
        left, right = p - len(prompt), r - len(response)
        row = {
            name: values[0] for name, values in jagged([[prompt, response, depth, calls]]).items()
        }
        row["prompts"] = [pad] * left + prompt
        row["responses"] = response + [pad] * right
        row["input_ids"] = row["prompts"] + row["responses"]
        row["attention_mask"] = [0] * left + [1] * len(depth) + [0] * right
        row["position_ids"] = [0] * left + depth + depth[-1:] * right
        row["response_mask"] = row["response_mask"] + [0] * right
        row["call_index"] = calls + [-1] * right
        row["token_level_scores"] = row["token_level_scores"] + [0.0] * right
        for name, values in row.items():
            tensors[name].append(values)
    return tensors
