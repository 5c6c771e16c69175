"""Rollouts whose calls were sampled by several policy versions."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="needs the extra [cpu]")

import agl_fast
import support.verl_trainer_imports  # noqa: F401
from agl_fast.rollouts.training_rows import policy_version_columns
from agl_fast.training import ppo_step
from agl_fast.training.audit_scope import Scope
from agl_fast.training.policy_audit import PolicyAudit, PolicyMismatchError
from agl_fast.training.staleness import staleness_metrics, token_versions
from agl_fast.training.step_rows import Rows
from support import engine_workers, invariance
from support.invariance import Cut, difference
from support.invariance_fixtures import fixtures
from support.plain_actor import PlainActor, plain_model
from support.plain_tree_actor import PlainTreeActor

pytestmark = pytest.mark.filterwarnings("ignore")  # verl's, torch's and transformers' own

VERSION = 5
STALE_MODEL = {VERSION: 1, VERSION - 1: 7, VERSION - 2: 8}  # seeds of the sampling policies
THRESHOLD = 1.3
LEVELS = ("transition", "trajectory", "tree")

folder, config, two_ranks, one_rank, of_two_ranks, from_calls = fixtures(
    "invariance_ranks.py", invariance.AS_CALLS
)


def log_probs(model: Any, call: agl_fast.Call) -> torch.Tensor:
    """(tokens of the answer,) log-probs of one call, forwarded alone."""
    ids = torch.tensor([[*call.prompt_ids, *call.response_ids]])
    logits = model(input_ids=ids).logits[0, len(call.prompt_ids) - 1 : -1]
    answer = torch.tensor(call.response_ids)[:, None]
    return logits.log_softmax(-1).gather(-1, answer)[:, 0]


def stale_rollouts(seed: int = 0) -> list[agl_fast.Rollout]:
    """Each call with the log-probs of its version's policy; versions grow along a rollout."""
    made = ORIGINAL(seed)
    draw = random.Random(3)
    models = {version: plain_model(seed) for version, seed in STALE_MODEL.items()}
    for rollout in made:
        versions = sorted(draw.choice(list(STALE_MODEL)) for _ in rollout.calls)
        for call, version in zip(rollout.calls, versions, strict=True):
            with torch.no_grad():
                call.log_probs = log_probs(models[version], call).tolist()
            call.policy_version = version
    return made


ORIGINAL = invariance.rollouts


@pytest.fixture(autouse=True)
def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance, "rollouts", stale_rollouts)
    cut_into_rows = invariance.cut_into_rows

    def cut_with_versions(cut: Cut) -> agl_fast.Batch:
        batch = cut_into_rows(cut)
        batch.columns = {**batch.columns, **policy_version_columns(stale_rollouts(), batch)}
        return batch

    monkeypatch.setattr(invariance, "cut_into_rows", cut_with_versions)


def corrected(config: Any, **actor: Any) -> Any:
    config = config.copy()
    config.actor_rollout_ref.rollout.temperature = 1.0  # as of `log_probs`
    config.algorithm.rollout_correction.rollout_is = "token"
    config.algorithm.rollout_correction.rollout_is_threshold = THRESHOLD
    for name, value in actor.items():
        config.actor_rollout_ref.actor[name] = value
    return invariance.ask_for(config, "vanilla", "token-mean")


def train(model: Any, cut: Cut, config: Any, *, learning_rate: float, **step: Any) -> None:
    """Take one `ppo_step` with the model as actor; `step` are its further arguments."""
    actor_cls = PlainTreeActor if cut.level == "tree" else PlainActor
    actor = actor_cls(model, micro_batch_size=cut.micro_batch_size, learning_rate=learning_rate)
    batch = invariance.cut_into_rows(cut)
    workers = engine_workers.worker_groups(actor, actor_cls(plain_model(2)))
    ppo_step(batch, workers, config, n_rollouts=len(batch.rollouts), global_step=1, **step)


def cuts() -> list[Cut]:
    return [
        Cut("transition", 4, shuffled=True),
        Cut("trajectory", 3),
        Cut("trajectory", 64, shuffled=True, trim=False),
    ]


def learned(cut: Cut, config: Any) -> invariance.Learned:
    actor = PlainTreeActor if cut.level == "tree" else PlainActor
    return invariance.learned_by_plain_model(cut, config, actor, policy_version=VERSION)


def test_every_level_learns_the_same(one_rank, config):
    asked = corrected(config)
    expected = learned(invariance.AS_CALLS, asked)
    for cut in [*cuts(), Cut("tree", 64), Cut("tree", 3, shuffled=True, tree_max_tokens=60)]:
        assert difference(expected, learned(cut, asked)) < 1e-9
    without = corrected(config)
    without.algorithm.rollout_correction.rollout_is = None
    assert difference(expected, learned(invariance.AS_CALLS, without)) > 1e-4


@pytest.mark.parametrize("level", LEVELS)
def test_the_gradient_is_that_of_decoupled_ppo_call_by_call(one_rank, config, level):
    """One mini-batch from the step's policy on: ratios are 1, and so are their clips."""
    asked = corrected(
        config,
        ppo_mini_batch_size=invariance.N_GROUPS,
        use_kl_loss=False,
        entropy_coeff=0.0,
    )
    model = plain_model(1)
    rate = 0.5
    train(model, Cut(level, 5), asked, learning_rate=rate, policy_version=VERSION)
    found = invariance.flat(model.parameters()) - invariance.flat(plain_model(1).parameters())

    rollouts = stale_rollouts()
    policy = plain_model(1)
    loss, n_tokens = torch.zeros((), dtype=torch.float64), 0
    for rollout in rollouts:
        group = [each.reward for each in rollouts if each.data_id == rollout.data_id]
        advantage = (rollout.reward - np.mean(group)) / (np.std(group, ddof=1) + 1e-6)
        for call in rollout.calls:
            current = log_probs(policy, call)
            behaviour = torch.tensor(call.log_probs, dtype=torch.float32).double()
            weight = (current.detach() - behaviour).exp().clamp(max=THRESHOLD)
            ratio = (current - current.detach()).exp()
            loss = loss - (weight * ratio * advantage).sum()
            n_tokens += len(call.response_ids)
    (loss / n_tokens).backward()
    gradient = invariance.flat(each.grad for each in policy.parameters())
    assert float(gradient.norm()) > 0.01
    assert float((found + rate * gradient).norm() / (rate * gradient).norm()) < 1e-7


@pytest.mark.parametrize("level", LEVELS)
def test_every_token_has_the_version_of_its_call(level):
    rows = Rows.of(invariance.cut_into_rows(Cut(level, 64)))
    versions = token_versions(rows)
    assert versions is not None
    n_of_version = dict.fromkeys(STALE_MODEL, 0)
    for rollout in stale_rollouts():
        for call in rollout.calls:
            n_of_version[call.policy_version] += len(call.response_ids)
    trained = versions[rows.response_mask.bool()].tolist()
    assert {version: trained.count(version) for version in STALE_MODEL} == n_of_version
    metrics = staleness_metrics(rows, VERSION)
    n = sum(n_of_version.values())
    assert metrics["training/staleness/max"] == 2
    assert metrics["training/staleness/tokens/1"] == n_of_version[VERSION - 1] / n
    assert metrics["training/staleness/mean"] == pytest.approx(
        sum((VERSION - version) * count for version, count in n_of_version.items()) / n
    )


def audited(config: Any, version_of_actor: int) -> None:
    """Audit a batch of 12 rollouts many times, with the policy of seed 1 as actor."""
    config = corrected(config)
    audits = PolicyAudit(Scope("float32"))
    for _ in range(8):
        train(
            plain_model(1),
            Cut("trajectory", 64),
            config,
            learning_rate=0.0,
            policy_version=version_of_actor,
            policy_audit=audits,
        )
    assert audits.last is not None


def test_the_audit_compares_tokens_of_the_current_version_only(one_rank, config):
    audited(config, VERSION)
    # The same log-probs, said to be of the actor's version, are not the actor's.
    with pytest.raises(PolicyMismatchError):
        audited(config, VERSION - 1)
