"""The audit tells parted weights from rounding."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from omegaconf import OmegaConf

import verl_trainer_imports  # noqa: F401
from agl_fast.verl.trainer.audit import Audit, PolicyMismatchError, audit, computes_exactly

ALL_KNOWN = torch.ones(8, dtype=torch.bool)


def log_probs(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(8, 40, generator=generator).clamp(min=1e-3).log()


def mask() -> torch.Tensor:
    """Every row: 10 trained, 10 observed, 20 trained tokens."""
    mask = torch.ones(8, 40, dtype=torch.int64)
    mask[:, 10:20] = 0
    return mask


def test_equal_policies_pass_and_are_measured():
    same = audit(log_probs(), log_probs(), mask(), ALL_KNOWN)
    same.require_same_policy(exact=True)
    assert same.n_tokens == 8 * 30
    assert same.mean_difference == 0.0
    assert same.correlation == pytest.approx(1.0)


def test_first_tokens_after_an_observation_have_percentiles_of_their_own():
    off = log_probs().clone()
    off[:, 20] += 0.5
    found = audit(log_probs(), off, mask(), ALL_KNOWN).metrics
    assert found["training/audit/logprob_diff/after_observation/p50"] == pytest.approx(0.5)
    assert found["training/audit/logprob_diff/rest/p99"] == 0.0
    assert found["training/audit/logprob_diff/all/p50"] == 0.0
    assert found["training/audit/logprob_diff/all/p99"] == pytest.approx(0.5)


def test_what_is_not_trained_or_not_known_is_left_out():
    other = log_probs().clone()
    other[:, 10:20] = 0.0
    other[3] = 0.0
    known = ALL_KNOWN.clone()
    known[3] = False
    found = audit(log_probs(), other, mask(), known)
    assert found.n_tokens == 7 * 30
    assert found.mean_difference == 0.0


def test_other_weights_stop_an_exact_run_and_warn_otherwise(caplog):
    parted = audit(log_probs(0), log_probs(1), mask(), ALL_KNOWN)
    with pytest.raises(PolicyMismatchError, match=r"240 trained tokens differ by 0\.\d"):
        parted.require_same_policy(exact=True)
    with caplog.at_level(logging.WARNING):
        parted.require_same_policy(exact=False)
    assert "differ by" in caplog.text


def test_a_slight_shift_of_all_probabilities_stops_an_exact_run():
    shifted = (log_probs().exp() * 0.995).log()
    found = audit(log_probs(), shifted, mask(), ALL_KNOWN)
    assert found.correlation == pytest.approx(1.0)
    with pytest.raises(PolicyMismatchError):
        found.require_same_policy(exact=True)


def test_probabilities_that_are_all_alike_are_not_correlated():
    alike = torch.full((8, 40), -4.6) + 1e-4 * log_probs()
    found = audit(alike, alike.flip(0), mask(), ALL_KNOWN)
    assert math.isnan(found.correlation)
    found.require_same_policy(exact=True)


@pytest.mark.parametrize("exact", [True, False])
def test_log_probs_that_are_no_numbers_stop_every_run(exact):
    broken = log_probs().clone()
    broken[0, 0] = float("nan")
    with pytest.raises(PolicyMismatchError, match="of 240 trained tokens are not all finite"):
        audit(log_probs(), broken, mask(), ALL_KNOWN).require_same_policy(exact=exact)
    broken[:] = float("nan")
    broken[0, :10] = log_probs()[0, :10]
    unknown = ~ALL_KNOWN
    audit(log_probs(), broken, mask(), unknown).require_same_policy(exact=exact)


def test_few_tokens_decide_nothing():
    Audit(199, 0.5, float("nan"), {}).require_same_policy(exact=True)
    nothing = audit(None, log_probs(), mask(), ALL_KNOWN)
    nothing.require_same_policy(exact=True)
    assert nothing.metrics == {"training/audit/n_tokens": 0}


@pytest.mark.parametrize(
    ("rollout", "actor", "sampling", "exact"),
    [
        ("float32", "fp32", "enforce", True),
        ("float32", "fp32", "allow", False),
        ("bfloat16", "fp32", "enforce", False),
        ("float32", "bf16", "enforce", False),
    ],
)
def test_exactness_follows_from_the_configuration(rollout, actor, sampling, exact):
    assert computes_exactly(configured(rollout, actor, sampling)) is exact


@pytest.mark.parametrize(
    ("changes", "exact"),
    [
        ({"top_p": 0.9}, False),
        ({"top_k": 20}, False),
        ({"top_k": 0}, True),
        ({"temperature": 0.5}, True),
        ({"logprobs_mode": "raw_logprobs"}, True),
        ({"logprobs_mode": "raw_logprobs", "temperature": 0.5}, False),
    ],
)
def test_exactness_needs_the_same_distribution(changes, exact):
    assert computes_exactly(configured("float32", "fp32", "enforce", **changes)) is exact


def configured(rollout, actor, sampling, **changes):
    sampled = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs_mode": "processed_logprobs"}
    return OmegaConf.create(
        {
            "actor_rollout_ref": {
                "rollout": {"dtype": rollout, **sampled, **changes},
                "actor": {"fsdp_config": {"mixed_precision": {"param_dtype": actor}}},
            },
            "agentlightning": {"sampling": sampling},
        }
    )
