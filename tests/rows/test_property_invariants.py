"""What must hold of every batch, whichever implementation built it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from agl_fast.rows.accounting import EmptyBatchError
from support.implementations import BUILDS
from support.plain_rollouts import PlainRollout
from support.simulated_agents import CHAINS, options, several_rollouts

both = pytest.mark.parametrize("implementation", ["reference", "native"])


def build_or_accounting(implementation: str, rollouts: Any, chosen: Any) -> tuple[Any, Any]:
    try:
        batch = BUILDS[implementation](rollouts, **chosen)
    except EmptyBatchError as error:
        return None, error.accounting
    return batch, batch.accounting


@both
@given(several_rollouts(), options(call_index=True))
def test_every_sampled_token_ends_in_one_class(
    implementation: str, rollouts: list[PlainRollout], chosen: dict[str, Any]
) -> None:
    batch, accounting = build_or_accounting(implementation, rollouts, chosen)
    parts = [accounting] if batch is None else [accounting, *(e.accounting for e in batch.rollouts)]
    for part in parts:
        assert part.sampled == part.trained + part.truncated + part.dropped + part.duplicate
        assert part.dropped == sum(part.dropped_by_reason.values())
    assert accounting.sampled == sum(
        len(call.response_ids) for rollout in rollouts for call in rollout.calls
    )
    if batch is None:
        return
    total = batch.rollouts[0].accounting
    for entry in batch.rollouts[1:]:
        total = total + entry.accounting
    assert accounting == total
    assert accounting.trained == sum(
        sum(mask)
        for mask, is_drop in zip(
            batch.tensors["response_mask"], batch.tensors["is_drop_mask"], strict=True
        )
        if not is_drop
    )
    assert sum(entry.n_rows for entry in batch.rollouts) == len(batch.tensors["prompts"])
    assert [entry.rollout_id for entry in batch.rollouts] == [r.rollout_id for r in rollouts]


@both
@given(several_rollouts(), options(CHAINS, call_index=True, layout="jagged"))
def test_every_trained_token_stands_where_it_was_sampled(
    implementation: str, rollouts: list[PlainRollout], chosen: dict[str, Any]
) -> None:
    batch, _ = build_or_accounting(implementation, rollouts, chosen)
    if batch is None:
        return
    calls = {rollout.rollout_id: rollout.calls for rollout in rollouts}
    trained = set()
    for row in range(len(batch.tensors["prompts"])):
        rollout_id = batch.columns["rollout_id_list"][row]
        response = batch.tensors["responses"][row]
        sampled_by = batch.tensors["call_index"][row]
        tokens = batch.tensors["prompts"][row] + response
        n_prompt = len(tokens) - len(response)
        first_call = calls[rollout_id][batch.columns["first_call_index_list"][row]]
        prompt_was_cut = chosen["overlong_prompt"] == "drop" or (
            chosen["overlong_prompt"] is None and chosen["level"] == "transition"
        )
        lost = max(len(first_call.prompt_ids) - n_prompt, 0) if prompt_was_cut else 0
        for at, (call_index, mask) in enumerate(
            zip(sampled_by, batch.tensors["response_mask"][row], strict=True)
        ):
            assert mask == (call_index != -1)
            if not mask:
                continue
            call = calls[rollout_id][call_index]
            k = at - sampled_by.index(call_index)
            assert response[at] == call.response_ids[k]
            seen = call.prompt_ids + call.response_ids[:k]
            if lost:
                assert batch.tensors["is_drop_mask"][row]
                seen = seen[:n_prompt] + seen[n_prompt + lost :]
            assert tokens[: n_prompt + at] == seen
            if "rollout_log_probs" in batch.tensors and call.log_probs is not None:
                log_prob = batch.tensors["rollout_log_probs"][row][at]
                assert log_prob == pytest.approx(call.log_probs[k], rel=1e-6, abs=1e-37)
            assert (rollout_id, call_index, k) not in trained
            trained.add((rollout_id, call_index, k))


@both
@given(several_rollouts(), options(call_index=True))
def test_layout_and_trim_change_nothing_that_is_learned(
    implementation: str, rollouts: list[PlainRollout], chosen: dict[str, Any]
) -> None:
    forms = [{"layout": "padded", "trim": False}, {"layout": "padded", "trim": True}]
    padded, trimmed = (
        build_or_accounting(implementation, rollouts, chosen | form)[0] for form in forms
    )
    jagged, _ = build_or_accounting(implementation, rollouts, chosen | {"layout": "jagged"})
    if jagged is None:
        assert padded is None
        assert trimmed is None
        return
    lengths = [
        (len(prompt), len(response))
        for prompt, response in zip(
            jagged.tensors["prompts"], jagged.tensors["responses"], strict=True
        )
    ]
    for batch in (padded, trimmed):
        prompt_width = len(batch.tensors["prompts"][0])
        assert batch.columns == jagged.columns
        assert batch.rollouts == jagged.rollouts
        assert batch.mismatches == jagged.mismatches
        assert batch.tensors.keys() == jagged.tensors.keys() | {"attention_mask"}
        for key, rows in jagged.tensors.items():
            stripped = [
                _without_padding(key, row, prompt_width, *lengths[index])
                for index, row in enumerate(batch.tensors[key])
            ]
            assert stripped == rows, key
    assert len(trimmed.tensors["prompts"][0]) == max(prompt for prompt, _ in lengths)
    assert len(trimmed.tensors["responses"][0]) == max(response for _, response in lengths)


def _without_padding(key: str, row: Any, prompt_width: int, n_prompt: int, n_response: int) -> Any:
    if key == "is_drop_mask":
        return row
    if key == "prompts":
        return row[prompt_width - n_prompt :]
    if key in ("input_ids", "position_ids"):
        return row[prompt_width - n_prompt : prompt_width + n_response]
    return row[:n_response]
