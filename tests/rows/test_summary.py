"""The paragraph at the end of a run, and the limits that it advises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import agl_fast
from agl_fast.rollouts.training_rows import TrainingRows
from agl_fast.rows.builder import FittingLimits, fitting_limits
from agl_fast.rows.token_summary import FITTING, TokenSummary


def rollout(name: str, *calls: tuple[list[int], list[int]]) -> agl_fast.Rollout:
    return agl_fast.Rollout(name, "g", [agl_fast.Call(*call) for call in calls], 1.0)


def metrics_of(*rollouts: agl_fast.Rollout, level: Any = "trajectory", **options: Any) -> Any:
    limits = {"max_prompt_length": 8, "max_response_length": 8, "pad_token_id": 0}
    return agl_fast.build_batch(rollouts, level=level, **{**limits, **options}).metrics


def test_everything_is_trained() -> None:
    summary = TokenSummary("trajectory")
    for name in ("a", "b"):
        summary.add(metrics_of(rollout(name, ([1], [2, 3]), ([1, 2, 3], [4, 5]))))
    assert str(summary) == (
        "2 steps sampled 8 tokens in 4 calls: 100.0% trained. No call broke a prefix."
    )
    assert not summary.is_noteworthy


def test_classes_reasons_and_broken_prefixes() -> None:
    calls = [
        agl_fast.Call([1, 2], [3, 4], response_id="x"),
        agl_fast.Call([1, 2], [3, 4], response_id="x"),
        agl_fast.Call([1, 2, 9], [5] * 4),
        agl_fast.Call([7], [8] * 6, trainable=False),
        agl_fast.Call([8], [8], finish_reason="abort"),
        agl_fast.Call([1], [5]),
    ]
    metrics = metrics_of(agl_fast.Rollout("r", "g", calls, 1.0))
    summary = TokenSummary("trajectory")
    summary.add({**metrics, "training/skipped_tokens": 4, "training/skipped_tokens/failed": 4})
    text = str(summary)
    assert text.startswith(
        "1 step sampled 20 tokens in 6 calls: 35.0% trained, 10.0% recorded twice, 5.0% dropped "
        "(interrupted by a weight sync), 30.0% dropped (calls excluded from training), 20.0% of "
        "skipped rollouts (failed). 2 calls broke the prefix of the calls before"
    )
    assert "1 with a shortened history, 1 with a rewritten history" in text
    assert "Level tree" in text
    assert not summary.is_noteworthy


def test_answers_that_a_limit_cut_off_are_told() -> None:
    """Every answer of two steps, of which one trains nothing, ends with its max_tokens."""
    summary = TokenSummary("trajectory")
    calls = [agl_fast.Call([1], [n], finish_reason="length") for n in (2, 3, 4)]
    summary.add(metrics_of(agl_fast.Rollout("r", "g", calls, 1.0)))
    summary.add({"training/n_recorded_calls": 1, "training/finish_reason/length": 1.0})
    assert "100.0% of the answers were cut off by max_tokens" in str(summary)
    stops = [agl_fast.Call([1], [n], finish_reason="stop") for n in range(400)]
    summary.add(metrics_of(agl_fast.Rollout("r", "g", stops, 1.0)))
    assert "max_tokens" not in str(summary)


def test_tokens_that_the_proxy_lost_are_told() -> None:
    summary = TokenSummary("trajectory")
    metrics = metrics_of(rollout("a", ([1], [2, 3])))
    summary.add({**metrics, "training/proxy/refused_tokens": 5, "training/proxy/late_tokens": 1})
    assert (
        "The servers sampled 6 tokens outside the batch: 5 in answers that the proxy refused, "
        "1 after the end of their rollout."
    ) in str(summary)


def test_limits_that_took_tokens_are_told_with_those_that_fit() -> None:
    summary = TokenSummary("trajectory", {"max_response_length": "R"})
    summary.add(metrics_of(rollout("a", ([1], [2] * 30))) | {f"{FITTING}max_response_length": 30})
    summary.add(metrics_of(rollout("b", ([1], [2] * 20))) | {f"{FITTING}max_response_length": 20})
    assert summary.is_noteworthy
    assert str(summary).endswith(
        "68.0% truncated. No call broke a prefix. Limits took 68.0% of the tokens; nothing would "
        "have been cut with R=30."
    )


def test_level_transition_says_what_it_costs() -> None:
    summary = TokenSummary("transition")
    summary.add(metrics_of(rollout("a", ([1], [2]), ([1, 2], [3])), level="transition"))
    assert "level trajectory merges calls that extend each other into one row" in str(summary)


def test_level_tree_has_no_chains_whose_prefix_could_break() -> None:
    summary = TokenSummary("tree")
    summary.add(metrics_of(rollout("a", ([1, 2], [3]), ([1, 9], [4])), level="tree"))
    assert str(summary) == "1 step sampled 2 tokens in 2 calls: 100.0% trained."


def test_before_the_first_step() -> None:
    assert str(TokenSummary("trajectory")) == "No step was finished."


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ({"level": "trajectory", "spill_from": 2}, FittingLimits(2, 8, 10)),
        ({"level": "trajectory"}, FittingLimits(4, 6, 10)),
        ({"level": "transition"}, FittingLimits(7, 3, 10)),
    ],
)
def test_fitting_limits(options: Any, limits: FittingLimits) -> None:
    long = rollout("a", ([1, 2, 3, 4], [5, 6]), ([1, 2, 3, 4, 5, 6, 7], [8, 9, 10]))
    rollouts = [long, rollout("b", ([1], [2]))]
    assert fitting_limits(rollouts, **options) == limits
    batch = agl_fast.build_batch(
        rollouts,
        level=options["level"],
        max_prompt_length=limits.max_prompt_length,
        max_response_length=limits.max_response_length,
        max_total_length=limits.max_total_length,
        pad_token_id=0,
    )
    assert batch.accounting.trained == batch.accounting.sampled


@pytest.mark.parametrize(
    ("widths", "fitting"),
    [
        ((8, 8), {}),
        ((8, 4), {"max_prompt_length": 8, "max_response_length": 5}),
        ((1, 5), {"max_prompt_length": 1, "max_response_length": 6}),
    ],
)
def test_a_step_says_what_would_fit(widths: tuple[int, int], fitting: dict[str, int]) -> None:
    found = training_rows(level="trajectory").build(*widths, "cpu").metrics
    expected = {f"{FITTING}{name}": value for name, value in fitting.items()}
    assert {name: n for name, n in found.items() if name.startswith(FITTING)} == expected


def test_dropped_prompts_say_what_would_fit() -> None:
    found = training_rows(level="trajectory", overlong_prompt="drop").build(1, 5, "cpu").metrics
    assert found[f"{FITTING}max_prompt_length"] == 2
    assert found[f"{FITTING}max_response_length"] == 5


@pytest.mark.parametrize(("widths", "n_lines"), [((2, 5), 1), ((1, 5), 0), ((2, 4), 0)])
def test_levels_are_compared_where_neither_loses_tokens(
    widths: tuple[int, int], n_lines: int, messages: Callable[[], list[str]]
) -> None:
    """Rows that are cut or dropped are few tokens, and no measure of what merging saves."""
    training_rows(level="transition").build(*widths, "cpu")
    assert str(messages()).count("level trajectory would have forwarded 13 in 2") == n_lines


def training_rows(**aggregator: Any) -> TrainingRows:
    from agl_fast.training.credit import CreditAssignment

    rows = TrainingRows(
        aggregator, "skip", credit=CreditAssignment(), tokenizer=None, pad_token_id=0
    )
    for name, prompt in (("a", [1, 2]), ("b", [1])):
        calls = [agl_fast.Call(prompt, [5] * 5)]
        rows.add(agl_fast.Rollout(name, "g", calls, 1.0))
    return rows
