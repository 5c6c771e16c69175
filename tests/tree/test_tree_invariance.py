"""What one row a call teaches, the tree of a rollout teaches, too.

As test_invariance, with rows of level tree: siblings, retries of equal answers, forks, rewritten
history, several roots, and trees that were split.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_fast.training import step
from agl_fast.training.estimators import OF_ROLLOUTS
from agl_fast.tree.tree_workers import CpuTreeTrainingWorker
from support import invariance, plain_tree_actor
from support.invariance import (
    AS_CALLS,
    BRANCHED_AS_CALLS,
    BRANCHED_AS_TREES,
    OBJECTIVES,
    QUICK_OR_SLOW,
    Cut,
    difference,
)
from support.invariance_fixtures import fixtures
from support.plain_tree_actor import PlainTreeActor, PlainTreeCritic

# verl's, torch's and transformers' own.
pytestmark = pytest.mark.filterwarnings("ignore")

IN_FLOAT64 = 1e-9
IN_FLOAT32 = 1e-6
FOUND = 1e-4

THROUGH_ENGINES = (
    Cut("tree", 6, branched=True, tree_max_tokens=100),
    Cut("tree", 2, branched=True, shuffled=True, fixed=True, tree_max_tokens=60),
)


folder, config, two_ranks, one_rank, of_two_ranks, from_calls = fixtures(
    "tree_invariance_ranks.py", BRANCHED_AS_CALLS
)


def test_the_calls_make_every_kind_of_branch():
    batch = invariance.cut_into_rows(BRANCHED_AS_TREES[0])
    depths = batch.tensors["position_ids"]
    n_roots = ((depths == 0) & batch.tensors["attention_mask"].bool()).sum(dim=1)
    assert (n_roots > 1).any()
    assert len(invariance.cut_into_rows(BRANCHED_AS_TREES[1])) > len(batch)
    n_tokens = batch.tensors["attention_mask"].sum()
    assert (
        n_tokens < 0.7 * invariance.cut_into_rows(BRANCHED_AS_CALLS).tensors["attention_mask"].sum()
    )


@pytest.mark.parametrize(("policy_loss", "aggregation"), QUICK_OR_SLOW)
def test_trees_of_a_plain_model(from_calls, config, of_two_ranks, policy_loss, aggregation):
    asked = invariance.ask_for(config, policy_loss, aggregation)
    expected = from_calls(policy_loss, aggregation)
    for cut in BRANCHED_AS_TREES:
        found = invariance.learned_by_plain_model(cut, asked, actor_cls=PlainTreeActor)
        assert difference(expected, found) < IN_FLOAT64
    assert difference(expected, of_two_ranks["plain", policy_loss, aggregation]) < IN_FLOAT64


def test_plain_rows_go_through_unchanged(one_rank, config):
    asked = invariance.ask_for(config, "vanilla", "seq-mean-token-mean")
    expected = invariance.learned_by_plain_model(AS_CALLS, asked)
    for cut in (AS_CALLS, Cut("trajectory", 3)):
        found = invariance.learned_by_plain_model(cut, asked, actor_cls=PlainTreeActor)
        assert difference(expected, found) < IN_FLOAT64


@pytest.mark.parametrize("estimator", sorted({*OF_ROLLOUTS, "reinforce_plus_plus"}))
def test_every_estimator(one_rank, config, estimator):
    asked = invariance.ask_for(config.copy(), "vanilla", "token-mean")
    asked.algorithm.adv_estimator = estimator
    expected = invariance.learned_by_plain_model(BRANCHED_AS_CALLS, asked)
    found = invariance.learned_by_plain_model(BRANCHED_AS_TREES[1], asked, actor_cls=PlainTreeActor)
    assert difference(expected, found) < IN_FLOAT64


def test_an_actor_with_a_critic(one_rank, config):
    asked = invariance.ask_for(config.copy(), "vanilla", "token-mean")
    asked.algorithm.adv_estimator = "gae"
    expected = invariance.learned_with_critic(BRANCHED_AS_CALLS, asked)
    for cut in BRANCHED_AS_TREES:
        found = invariance.learned_with_critic(cut, asked, PlainTreeActor, PlainTreeCritic)
        assert difference(expected, found) < IN_FLOAT64


@pytest.mark.parametrize("name", plain_tree_actor.MUTANTS)
def test_a_mutant_is_found(from_calls, config, name):
    asked = invariance.ask_for(config, "vanilla", "token-mean")
    expected = from_calls("vanilla", "token-mean")
    found = [
        invariance.learned_by_plain_model(cut, asked, actor_cls=plain_tree_actor.MUTANTS[name])
        for cut in BRANCHED_AS_TREES
    ]
    assert max(difference(expected, learned) for learned in found) > FOUND


def test_merged_samples_are_found(from_calls, config, monkeypatch):
    """Of calls that sampled the same from the same prompt, the tree holds one."""
    merged = [
        replace(rollout, calls=[*{repr(call): call for call in rollout.calls}.values()])
        for rollout in invariance.branched_rollouts()
    ]
    monkeypatch.setattr(invariance, "branched_rollouts", lambda: merged)
    asked = invariance.ask_for(config, "vanilla", "token-mean")
    found = invariance.learned_by_plain_model(BRANCHED_AS_TREES[0], asked, actor_cls=PlainTreeActor)
    expected = from_calls("vanilla", "token-mean")
    apart = (expected.parameters - found.parameters).norm() / expected.parameters.norm()
    assert apart > FOUND


@pytest.fixture(scope="module")
def engines(one_rank: None, config: Any, folder: Path) -> list[invariance.Engines]:
    """verl's, and the one for trees."""
    folders = folder / "model", folder / "reference"
    return [
        invariance.Engines(config, *folders, worker_cls)
        for worker_cls in (None, CpuTreeTrainingWorker)
    ]


@pytest.mark.parametrize(("policy_loss", "aggregation"), QUICK_OR_SLOW)
def test_trees_through_the_engine(engines, config, of_two_ranks, policy_loss, aggregation):
    asked = invariance.ask_for(config, policy_loss, aggregation)
    stock, of_trees = engines
    expected = stock.learned(BRANCHED_AS_CALLS, asked)
    number = OBJECTIVES.index((policy_loss, aggregation))
    found = of_trees.learned(THROUGH_ENGINES[number % 2], asked)
    assert difference(expected, found) < IN_FLOAT32
    assert difference(expected, of_two_ranks["engine", policy_loss, aggregation]) < IN_FLOAT32


def test_plain_rows_through_the_engine(engines, config):
    asked = invariance.ask_for(config, "vanilla", "token-mean")
    stock, of_trees = engines
    expected = stock.learned(AS_CALLS, asked)
    for cut in (AS_CALLS, Cut("trajectory", 3)):
        assert difference(expected, of_trees.learned(cut, asked)) < IN_FLOAT32


def test_trees_do_not_reach_another_engine(engines, config):
    asked = invariance.ask_for(config, "vanilla", "token-mean")
    stock, _ = engines
    with pytest.raises(RuntimeError, match="the workers of the actor have another engine"):
        stock.learned(THROUGH_ENGINES[0], asked)


def test_another_engine_would_learn_something_else_without_an_error(engines, config, monkeypatch):
    monkeypatch.setattr(step, "require_tree_workers", lambda workers: None)
    asked = invariance.ask_for(config, "vanilla", "token-mean")
    stock, _ = engines
    found = stock.learned(THROUGH_ENGINES[0], asked)
    assert difference(stock.learned(BRANCHED_AS_CALLS, asked), found) > FOUND
