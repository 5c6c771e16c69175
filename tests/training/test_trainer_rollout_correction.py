"""verl's rollout correction, with calls as its sequences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from agl_fast import Call, Rollout
from agl_fast.training.rollout_correction import bypasses, correct, require_supported
from agl_fast.training.step_rows import Rows
from support.estimated_batches import LEVELS, build, by_token, placed

# Log of the ratio between actor and server, by token.
RATIOS = {
    ("A", 0, 0): math.log(2.0),
    ("A", 0, 1): math.log(2.0),
    ("A", 1, 0): math.log(0.5),
    ("A", 1, 1): math.log(0.8),
    ("B", 0, 0): 0.0,
}
OLD = dict(zip(RATIOS, [-0.5, -1.0, -1.5, -2.0, -0.75], strict=True))


SERVERS = {key: OLD[key] - RATIOS[key] for key in OLD}


def rollouts(*, without: tuple[str, int] | None = None) -> list[Rollout]:
    """The second call of A continues the first."""
    sampled = {
        call: [value for key, value in SERVERS.items() if key[:2] == call]
        for call in (("A", 0), ("A", 1), ("B", 0))
    }
    calls = {
        ("A", 0): Call([1], [2, 3], sampled["A", 0]),
        ("A", 1): Call([1, 2, 3, 7], [4, 5], sampled["A", 1]),
        ("B", 0): Call([1], [4], sampled["B", 0]),
    }
    if without is not None:
        calls[without].log_probs = None
    return [
        Rollout("A", "g", [calls["A", 0], calls["A", 1]], 1.0),
        Rollout("B", "g", [calls["B", 0]], 0.0),
    ]


def configured(missing: str = "recompute", **correction: Any) -> Any:
    return OmegaConf.create(
        {
            "algorithm": {"rollout_correction": correction or None},
            "agentlightning": {"missing_rollout_log_probs": missing},
        }
    )


def rows_of(batch: Any, **tensors: torch.Tensor) -> Rows:
    rows = Rows.of(batch)
    rows.tensors |= tensors
    return rows


def corrected(batch, config) -> tuple[dict[str, dict], dict[str, float]]:
    """By token."""
    changed, metrics = correct(rows_of(batch, old_log_probs=placed(batch, OLD)), config)
    return {name: by_token(batch, values) for name, values in changed.items()}, metrics


@pytest.mark.parametrize("level", LEVELS)
def test_weights_of_tokens(level):
    batch = build(rollouts(), level)
    found, metrics = corrected(batch, configured(rollout_is="token", rollout_is_threshold=1.5))
    expected = [1.5, 1.5, 0.5, 0.8, 1.0]
    assert list(found["rollout_is_weights"].values()) == pytest.approx(expected)
    assert set(found["response_mask"].values()) == {1}
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(sum(expected) / 5)
    assert metrics["training/n_calls_without_log_probs"] == 0


@pytest.mark.parametrize("level", LEVELS)
def test_weights_of_calls(level):
    found, _ = corrected(
        build(rollouts(), level), configured(rollout_is="sequence", rollout_is_threshold=3.0)
    )
    assert list(found["rollout_is_weights"].values()) == pytest.approx([3.0, 3.0, 0.4, 0.4, 1.0])


@pytest.mark.parametrize("level", LEVELS)
def test_rejected_calls(level):
    config = configured(rollout_rs="seq_sum_k1", rollout_rs_threshold="0.3_3.0")
    found, metrics = corrected(build(rollouts(), level), config)
    assert list(found["response_mask"].values()) == [0, 0, 1, 1, 1]
    assert "rollout_is_weights" not in found
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("level", LEVELS)
def test_rejected_tokens(level):
    # verl bounds the server's probability in units of the actor's.
    config = configured(rollout_rs="token_k1", rollout_rs_threshold="0.4_1.9")
    found, _ = corrected(build(rollouts(), level), config)
    assert list(found["response_mask"].values()) == [1, 1, 0, 1, 1]


@pytest.mark.parametrize("level", LEVELS)
def test_calls_without_log_probs_count_as_the_actors(level):
    config = configured(rollout_is="token")
    found, metrics = corrected(build(rollouts(without=("A", 0)), level), config)
    expected = [1.0, 1.0, 0.5, 0.8, 1.0]
    assert list(found["rollout_is_weights"].values()) == pytest.approx(expected)
    assert metrics["training/n_calls_without_log_probs"] == 1


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("correction", [{}, {"rollout_is": "token"}, {"bypass_mode": True}])
def test_calls_without_log_probs_may_be_left_out(level, correction):
    config = configured("drop", **correction)
    found, metrics = corrected(build(rollouts(without=("A", 0)), level), config)
    assert list(found["response_mask"].values()) == [0, 0, 1, 1, 1]
    assert metrics["training/n_calls_without_log_probs"] == 1


def test_steps_without_any_log_prob():
    batch = build([Rollout("B", "g", [Call([1], [4])], 0.0)])
    rows = rows_of(batch, old_log_probs=torch.zeros(1, 1))
    assert correct(rows, configured(rollout_is="token")) == ({}, {})
    assert not bypasses(rows, configured(bypass_mode=True))
    with pytest.raises(ValueError, match="missing_rollout_log_probs='drop'"):
        correct(rows, configured("drop"))


@pytest.mark.parametrize("level", LEVELS)
def test_bypass_takes_the_servers_log_probs(level):
    batch = build(rollouts(), level)
    config = configured(bypass_mode=True)
    assert bypasses(Rows.of(batch), config)
    assert not bypasses(Rows.of(batch), configured(rollout_is="token"))
    found, _ = corrected(batch, config)
    assert found["old_log_probs"] == pytest.approx(SERVERS)
    assert "rollout_is_weights" not in found


@pytest.mark.parametrize("level", LEVELS)
def test_bypass_asks_the_actor_where_some_are_missing(level):
    batch = build(rollouts(without=("A", 0)), level)
    config = configured(bypass_mode=True)
    assert not bypasses(Rows.of(batch), config)
    assert bypasses(Rows.of(batch), configured("drop", bypass_mode=True))
    found, _ = corrected(batch, config)
    expected = {key: (OLD if key[:2] == ("A", 0) else SERVERS)[key] for key in OLD}
    assert found["old_log_probs"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("wrong", "value"), [("loss_type", "reinforce"), ("rollout_rs", "token_k1")]
)
def test_what_bypass_cannot_do_is_refused(wrong, value):
    refused = configured(**{"bypass_mode": True, wrong: value}).algorithm
    with pytest.raises(ValueError, match=f"rollout_correction.{wrong}='{value}'"):
        require_supported(refused)
    alone = configured(**{wrong: value}, rollout_rs_threshold="0.5_2")
    require_supported(alone.algorithm)
    require_supported(configured(bypass_mode=True).algorithm)


def test_calls_must_be_told_apart_where_they_are_weighed_whole():
    batch = build(rollouts(), call_index=False)
    rows = rows_of(batch, old_log_probs=batch.tensors["rollout_log_probs"])
    with pytest.raises(ValueError, match="call_index=True"):
        correct(rows, configured(rollout_is="sequence"))
    correct(rows, configured(rollout_is="token"))


@pytest.mark.parametrize("level", LEVELS)
def test_the_reward_moves_to_the_last_token_that_is_left(level):
    from support import estimated_batches

    batch = build(rollouts(), level)
    kept = {**dict.fromkeys(RATIOS, 1), ("A", 1, 1): 0}
    batch.tensors["response_mask"] = placed(batch, kept).long()
    config = estimated_batches.configured("reinforce_plus_plus", gamma=0.5)
    found = estimated_batches.estimated(batch, config).tensors["returns"]
    assert by_token(batch, found) == {
        ("A", 0, 0): 0.25,
        ("A", 0, 1): 0.5,
        ("A", 1, 0): 1.0,
        ("B", 0, 0): 0.0,
    }
