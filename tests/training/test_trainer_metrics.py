"""Lengths, scores and rewards as verl names them, and what an observation must not reach."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import agl_fast
from agl_fast import Call, Rollout
from agl_fast.training.minibatches import zero_advantage_groups
from agl_fast.training.rollout_correction import correct
from agl_fast.training.step_metrics import data_metrics, rollout_metrics
from agl_fast.training.step_rows import Rows
from support.estimated_batches import build, configured, estimated

# Answers of 4, 3 and 5 tokens, with tool results of 1 and 2 tokens between them.
FIRST = Call([1, 2], [3, 4, 5, 6])
SECOND = Call([1, 2, 3, 4, 5, 6, 70], [7, 8, 9])
THIRD = Call([1, 2, 3, 4, 5, 6, 70, 7, 8, 9, 71, 72], [10, 11, 12, 13, 14])
# Another prompt: a row of its own at level trajectory, a branch at level tree.
OTHER = Call([1, 5], [6, 7])
LEVELS = ("transition", "trajectory", "tree")


def rollouts() -> list[Rollout]:
    return [
        Rollout("A", "g", [FIRST, SECOND, THIRD], 1.0),
        Rollout("B", "g", [OTHER], 0.0),
        Rollout("C", "g", [Call([1], [])], 4.0),  # gives no row
    ]


def with_advantages(batch: agl_fast.Batch, **changed: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a step, where A's tokens have advantage 2 and B's -1."""
    is_a = torch.from_numpy(batch.columns["rollout_id_list"] == "A")[:, None]
    advantages = torch.where(is_a, 2.0, -1.0) * batch.tensors["response_mask"]
    return {
        **batch.tensors,
        "token_level_rewards": batch.tensors["token_level_scores"],
        "advantages": advantages,
        "returns": advantages,
        **changed,
    }


@pytest.mark.parametrize(
    ("level", "sampled", "context", "prompt"),
    [
        ("transition", (14 / 4, 5, 2), (0, 0, 0), (23 / 4, 12, 2)),
        ("trajectory", (14 / 2, 12, 2), (1.5, 3, 0), (2, 2, 2)),
        ("tree", (14 / 2, 12, 2), (1.5, 3, 0), (2, 2, 2)),
    ],
)
def test_response_lengths_count_sampled_tokens(
    level: str, sampled: Any, context: Any, prompt: Any
) -> None:
    found = data_metrics(
        with_advantages(build(rollouts(), level)), (64, 64), use_critic=False, suffix="_x"
    )
    for name, expected in (
        ("response_length", sampled),
        ("response_length_non_aborted", sampled),
        ("context_length", context),
        ("prompt_length", prompt),
    ):
        values = tuple(found[f"{name}/{which}_x"] for which in ("mean", "max", "min"))
        assert values == pytest.approx(expected), name
    assert found["response/aborted_ratio_x"] == 0


def test_a_row_as_long_as_its_limit_is_clipped_whatever_it_holds() -> None:
    tensors = with_advantages(build(rollouts()))

    def ratio(widths: tuple[int, int], total: int | None = None) -> tuple[float, float]:
        found = data_metrics(tensors, widths, use_critic=False, suffix="", total=total)
        return found["prompt_length/clip_ratio"], found["response_length/clip_ratio"]

    assert ratio((64, 64)) == (0, 0)
    assert ratio((2, 15)) == (1, 0.5)  # 12 sampled tokens and 3 of tools
    assert ratio((64, 64), total=17) == (0, 0.5)


@pytest.mark.parametrize("level", LEVELS)
def test_names_of_verl_are_of_rollouts_at_every_level(level: str) -> None:
    batch = build(rollouts(), level)
    paid = batch.tensors["token_level_scores"] - 0.125 * batch.tensors["response_mask"]
    tensors = with_advantages(batch, token_level_rewards=paid)
    found = rollout_metrics(Rows(tensors, batch.columns, batch.rollouts))
    expected = {
        "critic/score": (5 / 3, 4, 0),
        "critic/rewards": ((5 - 14 / 8) / 3, 4, -0.5),
        "critic/advantages": ((2 * 12 - 2) / 14, 2, -1),
        "critic/returns": ((2 * 12 - 2) / 14, 2, -1),
        "response_length": (14 / 3, 12, 0),
        "response_length_non_aborted": (7, 12, 2),
        "prompt_length": (2, 2, 2),
    }
    for name, values in expected.items():
        assert tuple(found[f"{name}/{which}"] for which in ("mean", "max", "min")) == pytest.approx(
            values
        ), name
    assert found["response/aborted_ratio"] == pytest.approx(1 / 3)
    assert found["response_length/clip_ratio"] == 0


def test_a_rollout_that_lost_tokens_to_a_limit_is_clipped() -> None:
    batch = build(rollouts(), max_response_length=8)
    found = rollout_metrics(Rows(with_advantages(batch), batch.columns, batch.rollouts))
    assert found["response_length/clip_ratio"] == pytest.approx(1 / 3)


def on_observations(batch: agl_fast.Batch, value: float) -> torch.Tensor:
    """(B, R) 0.5 on trained tokens, and `value` on all others."""
    return torch.where(batch.tensors["response_mask"].bool(), 0.5, value)


class Controller:
    value = 0.1

    def update(self, *, current_kl: float, n_steps: int) -> None:
        self.current_kl = current_kl


WRONG = (float("nan"), float("inf"), float("-inf"))


@pytest.mark.parametrize("by_rollout", [True, False])
@pytest.mark.parametrize("estimator", ["grpo", "gae", "reinforce_plus_plus"])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_an_observation_has_reaches_nothing(
    estimator: str, wrong: float, by_rollout: bool
) -> None:
    def found(value: float) -> Any:
        batch = build(rollouts()[:2])
        config = configured(
            estimator, use_kl_in_reward=True, enable_rollout_level_advantage=by_rollout
        )
        known = on_observations(batch, value)
        step = estimated(
            batch,
            config,
            Controller(),
            old_log_probs=known,
            ref_log_prob=2 * known,
            values=known,
        )
        tensors = {**batch.tensors, **step.tensors, "values": known}
        metrics = data_metrics(tensors, (64, 64), use_critic=True, suffix="")
        metrics |= rollout_metrics(Rows(tensors, batch.columns, batch.rollouts))
        return step.tensors, metrics | step.metrics

    tensors, metrics = found(wrong)
    expected_tensors, expected_metrics = found(0.0)
    for name, values in tensors.items():
        torch.testing.assert_close(values, expected_tensors[name], msg=name)
    assert metrics == pytest.approx(expected_metrics, nan_ok=False)


@pytest.mark.parametrize("wrong", WRONG)
def test_corrected_log_probs_are_finite(wrong: float) -> None:
    batch = build([Rollout("A", "g", [FIRST, SECOND, THIRD], 1.0)])
    known = on_observations(batch, wrong)
    config = configured("grpo", rollout_correction={"bypass_mode": True})
    tensors = {**batch.tensors, "old_log_probs": known, "rollout_log_probs": known}
    changed, _ = correct(Rows(tensors, batch.columns, batch.rollouts), config)
    expected = torch.where(batch.tensors["response_mask"].bool(), 0.5, 0.0)
    for name in ("old_log_probs", "rollout_log_probs"):
        torch.testing.assert_close(changed[name], expected)


def test_groups_without_an_advantage_are_found_beside_nan() -> None:
    batch = build(rollouts()[:2])
    mask = batch.tensors["response_mask"]
    rows = Rows.of(batch)
    nan_elsewhere = torch.where(mask.bool(), 0.0, float("nan"))
    rows.tensors["advantages"] = nan_elsewhere
    assert zero_advantage_groups(rows) == {"g"}
    rows.tensors["advantages"] = nan_elsewhere + 1
    assert zero_advantage_groups(rows) == set()
    assert np.isnan(nan_elsewhere.numpy()).any()
