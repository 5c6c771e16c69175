"""The same calls, however they are cut into rows, teach the same.

Levels, the order of rows, micro-batches, trimming, one data-parallel rank or two: the same
advantages per token, and the same parameters after three mini-batches. In float64 on a plain model,
in float32 through verl's FSDP engine; with KL and entropy terms throughout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agl_fast.training.estimators import OF_ROLLOUTS
from support import invariance
from support.invariance import (
    AS_CALLS,
    OBJECTIVES,
    ONE_RANK,
    QUICK_OR_SLOW,
    TWO_RANKS,
    difference,
)
from support.invariance_fixtures import fixtures
from support.invariance_mutants import MUTANTS, verls_loss

# verl's, torch's and transformers' own.
pytestmark = pytest.mark.filterwarnings("ignore")

IN_FLOAT64 = 1e-10
IN_FLOAT32 = 1e-6
FOUND = 1e-4


folder, config, two_ranks, one_rank, of_two_ranks, from_calls = fixtures(
    "invariance_ranks.py", AS_CALLS
)


@pytest.fixture(scope="module")
def engines(one_rank: None, config: Any, folder: Path) -> invariance.Engines:
    return invariance.Engines(config, folder / "model", folder / "reference")


@pytest.mark.parametrize(("policy_loss", "aggregation"), OBJECTIVES)
def test_rows_of_one_rank(from_calls, config, policy_loss, aggregation):
    asked = invariance.ask_for(config, policy_loss, aggregation)
    expected = from_calls(policy_loss, aggregation)
    for cut in ONE_RANK:
        found = invariance.learned_by_plain_model(cut, asked)
        assert difference(expected, found) < IN_FLOAT64


@pytest.mark.parametrize("estimator", sorted({*OF_ROLLOUTS, "reinforce_plus_plus"} - {"grpo"}))
def test_every_estimator(one_rank, config, estimator):
    asked = invariance.ask_for(config.copy(), "vanilla", "token-mean")
    asked.algorithm.adv_estimator = estimator
    expected, found = (
        invariance.learned_by_plain_model(cut, asked) for cut in (AS_CALLS, ONE_RANK[1])
    )
    assert difference(expected, found) < IN_FLOAT64


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum-norm"])
def test_an_actor_with_a_critic(one_rank, config, aggregation):
    asked = invariance.ask_for(config.copy(), "vanilla", "token-mean")
    asked.algorithm.adv_estimator = "gae"
    asked.critic.loss_agg_mode = aggregation
    expected = invariance.learned_with_critic(AS_CALLS, asked)
    for cut in ONE_RANK:
        assert difference(expected, invariance.learned_with_critic(cut, asked)) < IN_FLOAT64


def test_several_epochs_of_shuffled_rollouts(one_rank, config):
    asked = invariance.ask_for(config.copy(), "vanilla", "seq-mean-token-mean")
    asked.actor_rollout_ref.actor.ppo_epochs = 2
    asked.actor_rollout_ref.actor.shuffle = True
    expected = invariance.learned_by_plain_model(AS_CALLS, asked)
    for cut in ONE_RANK:
        assert difference(expected, invariance.learned_by_plain_model(cut, asked)) < IN_FLOAT64


@pytest.mark.parametrize(("policy_loss", "aggregation"), QUICK_OR_SLOW)
def test_rows_through_the_engine(engines, config, of_two_ranks, policy_loss, aggregation):
    asked = invariance.ask_for(config, policy_loss, aggregation)
    of_one_rank, _ = invariance.cuts_of_engines((policy_loss, aggregation))
    expected = engines.learned(AS_CALLS, asked)
    assert difference(expected, engines.learned(of_one_rank, asked)) < IN_FLOAT32
    assert difference(expected, of_two_ranks["engine", policy_loss, aggregation]) < IN_FLOAT32


@pytest.mark.parametrize(("policy_loss", "aggregation"), QUICK_OR_SLOW)
def test_rows_of_two_ranks(from_calls, of_two_ranks, policy_loss, aggregation):
    for cut in TWO_RANKS:
        found = of_two_ranks["plain", policy_loss, aggregation, cut]
        assert difference(from_calls(policy_loss, aggregation), found) < IN_FLOAT64


def test_a_gradient_that_is_not_summed_over_ranks_is_found(from_calls, of_two_ranks):
    assert difference(from_calls("vanilla", "token-mean"), of_two_ranks["mutant"]) > FOUND


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(one_rank, config, monkeypatch, name):
    mutate, policy_loss, aggregation = MUTANTS[name]
    asked = invariance.ask_for(config.copy(), policy_loss, aggregation)
    mutate(monkeypatch, asked)
    expected = invariance.learned_by_plain_model(AS_CALLS, asked)
    found = [invariance.learned_by_plain_model(cut, asked) for cut in ONE_RANK]
    assert max(difference(expected, learned) for learned in found) > FOUND


def test_verls_own_loss_is_no_mutant_where_the_token_is_the_unit(one_rank, config, monkeypatch):
    asked = invariance.ask_for(config, "vanilla", "token-mean")
    verls_loss(monkeypatch, asked)
    expected, found = (
        invariance.learned_by_plain_model(cut, asked) for cut in (AS_CALLS, ONE_RANK[0])
    )
    assert difference(expected, found) < IN_FLOAT64
