"""What a step does besides comparing rollouts, it does to trees as to their calls.

As test_tree_invariance, with what users may switch on: a KL penalty, credit, correction of what the
servers sampled, a limit of updates, trees of one run or of one call.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from omegaconf import OmegaConf

import agl_fast
from agl_fast.training.step_rows import Rows
from support import engine_workers, invariance
from support.invariance import BRANCHED_AS_CALLS, BRANCHED_AS_TREES, difference
from support.plain_tree_actor import PlainTreeActor

# verl's, torch's and transformers' own.
pytestmark = pytest.mark.filterwarnings("ignore")

IN_FLOAT64 = 1e-9
FOUND = 1e-4
Rollouts = list[agl_fast.Rollout]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return invariance.tiny_model(tmp_path_factory.mktemp("step"), 3)


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    with engine_workers.one_rank():
        dist.init_process_group("gloo")
        yield


@pytest.fixture
def config(model: Path) -> Any:
    asked = invariance.configured(model)
    asked.actor_rollout_ref.rollout.dtype = "bfloat16"  # servers may differ from the actor
    return invariance.ask_for(asked, "vanilla", "token-mean")


@pytest.fixture
def rollouts(monkeypatch: pytest.MonkeyPatch) -> Rollouts:
    """Those of the invariance tests, to be changed: ten calls each."""
    made = invariance.branched_rollouts()
    monkeypatch.setattr(invariance, "branched_rollouts", lambda: made)
    return made


def learned_alike(config: Any, told: Callable[[], dict[str, Any]] = dict) -> invariance.Learned:
    """What is learned from calls, having seen that trees teach the same."""
    expected = invariance.learned_by_plain_model(BRANCHED_AS_CALLS, config, **told())
    for cut in BRANCHED_AS_TREES:
        found = invariance.learned_by_plain_model(cut, config, PlainTreeActor, **told())
        assert difference(expected, found) < IN_FLOAT64
    return expected


def test_a_kl_penalty_in_the_reward(rollouts, config):
    def told() -> dict[str, Any]:
        controller = SimpleNamespace(value=0.3, update=lambda **_: None)
        return {"kl_controller": controller}

    plain = learned_alike(config)
    config.algorithm.use_kl_in_reward = True
    for estimator in ("grpo", "reinforce_plus_plus"):
        config.algorithm.adv_estimator = estimator
        assert difference(plain, learned_alike(config, told)) > FOUND


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus"])
def test_rewards_of_calls(rollouts, config, estimator):
    config.algorithm.adv_estimator = estimator
    plain = learned_alike(config)
    chances = random.Random(3)
    for rollout in rollouts:
        for call in rollout.calls[::2]:
            call.reward = chances.random()
    config.agentlightning.credit = "per_call"
    assert difference(plain, learned_alike(config)) > FOUND


def test_credit_of_calls(rollouts, config):
    plain = learned_alike(config)
    chances = random.Random(4)
    for rollout in rollouts:
        for call in rollout.calls:
            call.credit = chances.random()
    assert difference(plain, learned_alike(config)) > FOUND


def give_log_probs(rollouts: Rollouts) -> None:
    chances = random.Random(5)
    for rollout in rollouts:
        for call in rollout.calls:
            call.log_probs = [-chances.uniform(2.5, 4.5) for _ in call.response_ids]


@pytest.mark.parametrize(
    "correction",
    [
        {"rollout_is": "token", "rollout_is_threshold": 1.5},
        {"rollout_is": "sequence", "rollout_is_threshold": 1.5},
        {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
        {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.8_1.3"},
        {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"},
        {"bypass_mode": True},
    ],
)
@pytest.mark.parametrize("missing", ["recompute", "drop"])
def test_correction_of_what_servers_sampled(rollouts, config, correction, missing):
    give_log_probs(rollouts)
    plain = learned_alike(config)
    rollouts[3].calls[4].log_probs = None
    OmegaConf.update(config, "algorithm.rollout_correction", correction, force_add=True)
    config.agentlightning.missing_rollout_log_probs = missing
    assert difference(plain, learned_alike(config)) > FOUND


@pytest.mark.parametrize("limit", [1, 2])
def test_a_limit_of_updates(rollouts, config, limit):
    for rollout in rollouts[:4]:
        rollout.reward = 0.5  # both samples' advantages are 0
    plain = learned_alike(config)
    config.agentlightning.max_ppo_update_times = limit
    assert difference(plain, learned_alike(config)) > FOUND


def test_calls_that_teach_nothing(rollouts, config):
    """Empty answers, calls that are not trained, one recorded twice, a rollout of such calls."""
    plain = learned_alike(config)
    for rollout in rollouts:
        first, second, third, *_ = rollout.calls
        rollout.calls[0] = agl_fast.Call(first.prompt_ids, [])
        second.trainable = False
        third.response_id = "twice"
        rollout.calls.append(third)
    for call in rollouts[5].calls:
        call.trainable = False
    assert difference(plain, learned_alike(config)) > FOUND


def test_trees_that_are_all_one_run(rollouts, config):
    """They are plain rows, which any engine may train."""
    for rollout in rollouts:
        del rollout.calls[1:]
    expected = learned_alike(config)
    assert not Rows.of(invariance.cut_into_rows(BRANCHED_AS_TREES[0])).has_branches
    found = invariance.learned_by_plain_model(BRANCHED_AS_TREES[0], config)
    assert difference(expected, found) < IN_FLOAT64
