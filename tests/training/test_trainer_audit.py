"""The audit tells parted weights from rounding, at every precision, size and entropy."""

from __future__ import annotations

import logging
import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

import support.verl_trainer_imports  # noqa: F401
from agl_fast.training.audit import MIN_TOKENS, Audit, Gap, audit, bent_tokens
from agl_fast.training.audit_scope import Scope, scope_of
from agl_fast.training.policy_audit import LIMITS, PolicyAudit, PolicyMismatchError

ALL_KNOWN = torch.ones(8, dtype=torch.bool)


def log_probs(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(8, 40, generator=generator).clamp(min=1e-3).log()


def mask() -> torch.Tensor:
    """Every row: 10 trained, 10 observed, 20 trained tokens."""
    mask = torch.ones(8, 40, dtype=torch.int64)
    mask[:, 10:20] = 0
    return mask


def audited(rollout: Any, actor: torch.Tensor, *, known: Any = ALL_KNOWN, **changes: Any) -> Audit:
    return audit(rollout, actor, mask(), known, **{"scope": Scope(), **changes})


def test_equal_policies_pass_and_are_measured():
    same = audited(log_probs(), log_probs())
    PolicyAudit(Scope()).judge(same)
    assert same.gap.n_tokens == same.metrics["training/audit/n_tokens"] == 8 * 30
    assert same.gap.mean == 0.0
    assert same.gap.correlation == pytest.approx(1.0)


def test_first_tokens_after_an_observation_have_percentiles_of_their_own():
    off = log_probs().clone()
    off[:, 20] += 0.5
    found = audited(log_probs(), off).metrics
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
    found = audited(log_probs(), other, known=known)
    assert found.gap.n_tokens == 7 * 30
    assert found.gap.mean == 0.0


def test_verls_names_have_verls_numbers():
    from verl import DataProto
    from verl.utils.debug.metrics import calculate_debug_metrics

    tensors = {
        "rollout_log_probs": log_probs(0),
        "old_log_probs": log_probs(1),
        "response_mask": mask().bool(),
        "responses": mask(),
    }
    expected = calculate_debug_metrics(DataProto.from_dict(tensors=tensors))
    found = audited(log_probs(0), log_probs(1)).metrics
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_gaps_of_steps_add_up():
    rollout, actor = log_probs(0).flatten(), log_probs(1).flatten()
    whole = Gap.between(rollout, actor)
    added = Gap.between(rollout[:7], actor[:7]) + Gap.between(rollout[7:], actor[7:]) + Gap()
    for name in ("n_tokens", "mean", "deviation", "largest", "correlation", "of_logits"):
        assert getattr(added, name) == pytest.approx(getattr(whole, name))
    apart = (rollout.double().exp() - actor.double().exp()).abs()
    assert whole.deviation == pytest.approx(float(apart.std()))
    assert whole.correlation == pytest.approx(
        float(torch.corrcoef(torch.stack([rollout, actor]).double().exp())[0, 1])
    )
    assert math.isnan(Gap().mean)
    assert math.isnan(Gap().correlation)


def test_other_weights_stop_an_exact_run_at_once():
    parted = audited(log_probs(0), log_probs(1))
    with pytest.raises(PolicyMismatchError, match=r"240 trained tokens, .* differ by 0\.\d"):
        PolicyAudit(Scope()).judge(parted)


def test_a_slight_shift_of_all_probabilities_stops_an_exact_run():
    found = audited(log_probs(), (log_probs().exp() * 0.995).log())
    assert found.gap.correlation == pytest.approx(1.0)
    with pytest.raises(PolicyMismatchError):
        PolicyAudit(Scope()).judge(found)


def test_probabilities_that_are_all_alike_are_not_correlated():
    alike = torch.full((8, 40), -4.6) + 1e-4 * log_probs()
    found = audited(alike, alike.flip(0))
    assert math.isnan(found.gap.correlation)
    PolicyAudit(Scope()).judge(found)


@pytest.mark.parametrize("precision", list(LIMITS))
def test_log_probs_that_are_no_numbers_stop_every_run(precision):
    broken = log_probs().clone()
    broken[0, 0] = float("nan")
    judge = PolicyAudit(Scope(precision, stops=False)).judge
    with pytest.raises(PolicyMismatchError, match="of 240 trained tokens are not all finite"):
        judge(audited(log_probs(), broken))
    broken[:] = float("nan")
    broken[0, :10] = log_probs()[0, :10]
    judge(audited(log_probs(), broken, known=~ALL_KNOWN))


def test_no_log_probs_decide_nothing():
    nothing = audited(None, log_probs())
    PolicyAudit(Scope()).judge(nothing)
    assert nothing.metrics == {"training/audit/n_tokens": 0}


# How peaked policies are, by the spread of their logits over a vocabulary: from a guess among
# words that are all alike to answers known by heart.
POLICIES = [(64, 0.5), (64, 3.0), (512, 2.0), (512, 5.0), (512, 10.0), (2048, 4.0), (2048, 12.0)]
# Errors of logits: what rounding makes of them at a precision, and what is as bad as it gets.
ROUNDING = {"float32": 1e-5, "16-bit": 0.05, "quantised": 0.15}


@cache
def sampled(vocabulary: int, spread: float, noise: float, *, other: float = 0.0, n=2000, seed=0):
    """Log-probs of n tokens by servers, and by an actor whose logits differ.

    Args:
        noise: standard deviation of their difference.
        other: how much of the logits is other weights'.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(n, vocabulary, generator=generator, dtype=torch.float64)

    logits = spread * normal()
    actors = logits + other * spread * normal() + noise * normal()
    servers = logits.log_softmax(1)
    tokens = torch.multinomial(servers.exp(), 1, generator=generator)
    return servers.gather(1, tokens)[:, 0], actors.log_softmax(1).gather(1, tokens)[:, 0]


def judge(audits: PolicyAudit, *steps: Audit) -> None:
    for each in steps:
        audits.judge(each)


def step_of(*pair: torch.Tensor, **changes: Any) -> Audit:
    gap = Gap.between(*pair)
    return Audit(gap, everything=gap, **changes)


@pytest.mark.parametrize("precision", list(LIMITS))
@pytest.mark.parametrize(("vocabulary", "spread"), POLICIES)
def test_healthy_runs_say_nothing(precision, vocabulary, spread, caplog):
    """Also where the policy becomes far more, or far less, certain after the first step."""
    noise = ROUNDING[precision]
    for order in (POLICIES, POLICIES[::-1]):
        audits = PolicyAudit(Scope(precision))
        for seed in range(2):
            audits.judge(step_of(*sampled(vocabulary, spread, noise, seed=seed)))
        for later in order:
            audits.judge(step_of(*sampled(*later, noise)))
    assert caplog.text == ""


@pytest.mark.parametrize("precision", list(LIMITS))
@pytest.mark.parametrize(("vocabulary", "spread"), POLICIES[1:])
def test_a_sync_that_breaks_ends_the_run_within_two_steps(precision, vocabulary, spread, caplog):
    noise = ROUNDING[precision]
    audits = PolicyAudit(Scope(precision))
    for seed in range(3):
        audits.judge(step_of(*sampled(vocabulary, spread, noise, seed=seed)))
    assert caplog.text == ""
    broken = [step_of(*sampled(vocabulary, spread, noise, other=0.4, seed=each)) for each in (1, 2)]
    with pytest.raises(PolicyMismatchError, match="the servers do not hold the actor's weights"):
        judge(audits, *broken)
    assert len(caplog.records) == (0 if precision == "float32" else 1)


@pytest.mark.parametrize("precision", list(LIMITS))
def test_servers_that_never_got_the_weights_end_the_run_within_two_steps(precision):
    """All their probabilities are small, and so is the difference: the logits tell."""
    pair = sampled(2048, 1.0, 0.0, other=4.0)
    assert Gap.between(*pair).mean < 0.01
    with pytest.raises(PolicyMismatchError):
        judge(PolicyAudit(Scope(precision)), *[step_of(*pair)] * 2)


@pytest.mark.parametrize(
    ("precision", "moved"), [("16-bit", 0.2), ("16-bit", 0.5), ("quantised", 0.5)]
)
def test_a_lost_sync_shows_in_logits_that_were_equal_before(precision, moved, caplog):
    """A random model: its probabilities are all alike, before and after the first updates."""
    audits = PolicyAudit(Scope(precision))
    audits.judge(step_of(*sampled(512, 0.05, 0.0007)))
    lost = [step_of(*sampled(512, 0.05, moved, seed=each)) for each in (1, 2)]
    assert all(each.gap.mean < 0.005 for each in lost)
    assert caplog.text == ""
    with pytest.raises(PolicyMismatchError):
        judge(audits, *lost)


@pytest.mark.parametrize("precision", ["16-bit", "quantised"])
def test_rounding_that_grows_with_the_logits_is_no_lost_sync(precision, caplog):
    """From a random model to one that knows its answers: 12 / 0.05 times the rounding."""
    audits = PolicyAudit(Scope(precision))
    for spread in (0.05, 0.5, 2.0, 5.0, 12.0):
        for seed in range(2):
            audits.judge(step_of(*sampled(512, spread, spread / 200, seed=seed)))
    assert caplog.text == ""


def pair_of(difference: float, correlation: float) -> Gap:
    """1,000 tokens with these values, and logits as far apart as they would be."""
    n, variance = 1000, 0.1
    p = pp = q = 0.5 * n
    pp = n * (0.25 + variance)
    pq = n * (0.25 + variance * correlation)
    uncertainty = n * 0.5
    error = difference / 0.15 * uncertainty
    return Gap(n, difference * n, 0.0, 1.0, error, uncertainty, (p, q, pp, pp, pq))


@pytest.mark.parametrize("precision", ["16-bit", "quantised"])
def test_published_pairs(precision, caplog):
    """A healthy pair of bfloat16 sides (0.004, 0.998); a lost sync of a bfloat16 run (0.081,
    0.833), where the first step had 0.0018 and 0.9999."""
    healthy, lost = pair_of(0.004, 0.998), pair_of(0.081, 0.833)
    assert (healthy.mean, healthy.correlation) == pytest.approx((0.004, 0.998))
    for first in (pair_of(0.0018, 0.9999), healthy, None):
        audits = PolicyAudit(Scope(precision))
        if first is not None:
            audits.judge(Audit(first))
            audits.judge(Audit(healthy))
        assert caplog.text == ""
        with pytest.raises(PolicyMismatchError, match=r"differ by 0\.081 on average"):
            judge(audits, Audit(lost), Audit(lost))
        caplog.clear()


def test_a_wide_first_step_is_what_later_ones_are_compared_with(caplog):
    """Other kernels, experts or an 8-bit cache that no setting names."""
    noisy = {"noise": 0.3}
    audits = PolicyAudit(Scope("16-bit"))
    for seed in range(4):
        audits.judge(step_of(*sampled(512, 5.0, **noisy, seed=seed)))
    assert caplog.text == ""
    resumed = PolicyAudit(Scope("16-bit"))
    resumed.judge(step_of(*sampled(512, 5.0, 0.01)))
    with caplog.at_level(logging.WARNING):
        resumed.judge(step_of(*sampled(512, 5.0, **noisy)))
    assert "in the first step" in caplog.text


def test_one_broken_step_is_a_warning_and_a_whole_one_forgives_it(caplog):
    audits = PolicyAudit(Scope("16-bit"))
    whole = step_of(*sampled(512, 5.0, 0.05))
    broken = step_of(*sampled(512, 5.0, 0.05, other=0.4))
    for each in (whole, broken, whole, broken, whole):
        audits.judge(each)
    assert len(caplog.records) == 2
    assert "differ by 0.0063 on average and correlate by 0.9996" in str(audits)


def test_a_run_that_only_warns_goes_on(caplog):
    audits = PolicyAudit(Scope("float32", stops=False))
    for _ in range(3):
        audits.judge(step_of(*sampled(512, 5.0, 0.05)))
    assert len(caplog.records) == 3
    assert "agentlightning.audit=warn: the run goes on" in caplog.text


def test_small_steps_add_up():
    pair = sampled(512, 5.0, 0.0, other=1.0, n=MIN_TOKENS // 4)
    audits = PolicyAudit(Scope())
    for _ in range(3):
        audits.judge(step_of(*pair))
    with pytest.raises(PolicyMismatchError, match=f"in {MIN_TOKENS} trained tokens"):
        audits.judge(step_of(*pair))


def test_bent_calls_are_audited_apart_and_named_once(caplog):
    """The second call of every second row forced a tool call; its log-probs are near 0."""
    call_index = torch.where(mask().bool(), 0, -1)
    call_index[:, 20:] = 1
    column = np.array([{1: ("tool_choice",)} if row % 2 else {} for row in range(8)], dtype=object)
    bent, names = bent_tokens({"bent_calls_list": column}, call_index)
    assert bent.sum() == 4 * 20
    assert names == ("tool_choice",)
    rollout = log_probs().clone()
    rollout[1::2, 20:] = 0.0
    audits = PolicyAudit(Scope())
    for _ in range(6):
        found = audited(rollout, log_probs(), bent=bent, bent_by=names)
        audits.judge(found)
    assert found.metrics["training/audit/n_tokens"] == 8 * 30 - 4 * 20
    assert found.metrics["training/audit/prob_diff_max"] == 0.0
    assert found.metrics["training/audit/bent/n_tokens"] == 4 * 20
    assert found.metrics["training/audit/bent/prob_diff_mean"] > 0.1
    assert found.metrics["training/rollout_probs_diff_max"] > 0.1
    (record,) = caplog.records
    assert "Agents set tool_choice: in 240 trained tokens of such calls" in record.getMessage()


def test_no_bent_call():
    assert bent_tokens({}, torch.zeros(1, 1)) == (None, ())
    column = np.array([{}, {}], dtype=object)
    assert bent_tokens({"bent_calls_list": column}, torch.zeros(2, 1)) == (None, ())


def cut(log_probs: torch.Tensor, *, top_p: float = 1.0, top_k: int = 0) -> torch.Tensor:
    """Renormalised over what top_k and then top_p keep, as vLLM does; -inf elsewhere. (N, V)"""
    probs, order = log_probs.exp().sort(dim=1, descending=True)
    if top_k:
        probs[:, top_k:] = 0.0
        probs /= probs.sum(dim=1, keepdim=True)
    kept = probs.cumsum(dim=1) - probs < top_p
    probs = probs * kept
    probs /= probs.sum(dim=1, keepdim=True)
    return torch.zeros_like(probs).scatter(1, order, probs).log()


def cut_pairs(spread: float, top_p: float, top_k: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Log-probs of servers with the actor's weights, and with others: tokens of both alike."""
    generator = torch.Generator().manual_seed(1)

    def policy() -> torch.Tensor:
        logits = torch.randn(1000, 256, generator=generator, dtype=torch.float64)
        return logits.mul(spread).log_softmax(1)

    whole = policy()
    servers = cut(whole, top_p=top_p, top_k=top_k)
    tokens = torch.multinomial(servers.exp(), 1, generator=generator)
    return [
        (servers.gather(1, tokens)[:, 0], actor.gather(1, tokens)[:, 0])
        for actor in (whole, policy())
    ]


@pytest.mark.parametrize("top_p", [0.8, 0.95])
@pytest.mark.parametrize("spread", [1.0, 3.0, 8.0])
def test_what_top_p_keeps_is_compared_within_its_bounds(top_p, spread):
    same, other = cut_pairs(spread, top_p, 0)
    assert Gap.between(*same).mean > 1e-4
    scope = scope_of(configured("float32", "fp32", top_p=top_p))
    audits = PolicyAudit(scope)
    audits.judge(step_of(same[0], scope.nearest(*same)))
    assert audits.last.mean < 1e-12
    with pytest.raises(PolicyMismatchError):
        audits.judge(step_of(other[0], scope.nearest(*other)))


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 20), (0.9, 20), (1.0, 5)])
@pytest.mark.parametrize("spread", [3.0, 8.0])
def test_what_top_k_keeps_is_compared_with_the_first_step(top_p, top_k, spread, caplog):
    same, other = cut_pairs(spread, top_p, top_k)
    audits = PolicyAudit(scope_of(configured("float32", "fp32", top_p=top_p, top_k=top_k)))
    judge(audits, step_of(*same), step_of(*same))
    assert caplog.text == ""
    with pytest.raises(PolicyMismatchError):
        judge(audits, step_of(*other), step_of(*other))


def test_a_deep_cut_by_top_k_is_no_broken_sync(caplog):
    same, _ = cut_pairs(1.0, 1.0, 5)
    audits = PolicyAudit(scope_of(configured("float32", "fp32", top_k=5)))
    assert Gap.between(*same).mean > 0.1
    judge(audits, step_of(*same), step_of(*same))
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("rollout", "actor", "changes", "precision"),
    [
        ("float32", "fp32", {}, "float32"),
        ("bfloat16", "fp32", {}, "16-bit"),
        ("float32", "bf16", {}, "16-bit"),
        ("float16", "fp16", {}, "16-bit"),
        ("float32", "fp32", {"quantization": "fp8"}, "quantised"),
        ("bfloat16", "bf16", {"engine_kwargs": {"vllm": {"kv_cache_dtype": "fp8"}}}, "quantised"),
        ("bfloat16", "bf16", {"engine_kwargs": {"vllm": {"kv_cache_dtype": "auto"}}}, "16-bit"),
        ("bfloat16", "bf16", {"qat": {"enable": True}}, "quantised"),
    ],
)
def test_the_precision_follows_from_the_configuration(rollout, actor, changes, precision):
    assert scope_of(configured(rollout, actor, **changes)).precision == precision


@pytest.mark.parametrize(
    ("changes", "kept_mass", "said"),
    [
        ({}, 1.0, ""),
        ({"top_p": 0.9}, 0.9, "from p to p / 0.9"),
        ({"top_k": 20}, 0.0, "compares steps with the first one"),
        ({"top_k": 0}, 1.0, ""),
        ({"temperature": 0.5}, 1.0, ""),
        ({"logprobs_mode": "raw_logprobs", "top_p": 0.8, "top_k": 5}, 1.0, ""),
        ({"logprobs_mode": "raw_logprobs", "temperature": 0.5}, 1.0, "are not compared: with"),
        ({"logprobs_mode": "raw_logits"}, 1.0, "raw_logits gives no log-probs"),
    ],
)
def test_what_is_compared_follows_from_the_configuration(changes, kept_mass, said, messages):
    audits = PolicyAudit.of(configured("float32", "fp32", **changes))
    assert audits.scope.kept_mass == kept_mass
    logged = messages()
    assert said in str(logged)
    assert bool(logged) == bool(said)
    if audits.scope.incomparable:
        audits.judge(audited(log_probs(0), log_probs(1)))
        assert audits.last is None


def configured(rollout: str, actor: str, **changes: Any) -> Any:
    sampled = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs_mode": "processed_logprobs"}
    return OmegaConf.create(
        {
            "actor_rollout_ref": {
                "rollout": {"dtype": rollout, **sampled, **changes},
                "actor": {"fsdp_config": {"mixed_precision": {"param_dtype": actor}}},
            },
            "agentlightning": {},
        }
    )
