"""A critic on the CPU: its values, its update and its checkpoint, through verl's engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import agl_fast
from agl_fast.training import WorkerGroups, ppo_step
from agl_fast.training.step_rows import Rows
from agl_fast.training.worker_groups import critic_values, set_objectives
from support import engine_workers
from support.tiny_model import make_tiny_model

# verl's, torch's and transformers' own.
pytestmark = pytest.mark.filterwarnings("ignore")

P, R = 8, 8
IN_FLOAT32 = 5e-6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(folder, ["user\ncount apples"], max_length=P + R, seed=3)
    return folder


@pytest.fixture(scope="module")
def config(model: Path) -> Any:
    config = engine_workers.configured(
        model,
        n_groups=4,
        group_size=2,
        widths=(P, R),
        actor={"optim": {"lr": 0.0}},
        algorithm={"adv_estimator": "gae"},
    )
    config.critic.optim.lr = 0.02
    return config


@pytest.fixture(scope="module")
def workers(config: Any) -> Iterator[WorkerGroups]:
    with engine_workers.one_rank():
        actor = engine_workers.engine_worker(config)
        torch.manual_seed(7)  # the head is new
        groups = engine_workers.worker_groups(actor, critic=engine_workers.critic_worker(config))
        set_objectives(groups, config)
        yield groups


def batch() -> agl_fast.Batch:
    """Calls of several lengths, of which each rollout earns 1."""
    rollouts = [
        agl_fast.Rollout(
            str(n),
            f"group {n // 2}",
            [agl_fast.Call(list(range(5, 8 + n % 4)), list(range(20 + n, 22 + n + n % 5)))],
            1.0,
        )
        for n in range(8)
    ]
    return agl_fast.build_batch(
        rollouts,
        level="transition",
        max_prompt_length=P,
        max_response_length=R,
        pad_token_id=0,
        call_index=True,
    )


def values(workers: WorkerGroups, rows: agl_fast.Batch, config: Any) -> torch.Tensor:
    found = critic_values(Rows.of(rows), workers, config)["values"]
    return found[rows.tensors["response_mask"].bool()]


def test_a_critic_learns_the_reward(workers: WorkerGroups, config: Any, model: Path) -> None:
    assert config.critic.model.override_config.attn_implementation == "sdpa"
    rows, critic = batch(), workers.critic.worker
    losses = []
    for step in range(1, 13):
        expected = engine_workers.plain_values(critic, model, rows)
        assert (values(workers, rows, config) - expected).abs().max() < IN_FLOAT32
        metrics = ppo_step(rows, workers, config, n_rollouts=8, global_step=step).metrics
        assert metrics["critic/values/mean"] == pytest.approx(float(expected.mean()), abs=1e-5)
        assert metrics["critic/grad_norm"] > 0
        losses.append(metrics["critic/vf_loss"])
    # Without discount the value of every token is the rollout's reward.
    assert losses[0] == pytest.approx(0.5, rel=0.5)
    assert losses[-1] < losses[0] / 4
    assert (values(workers, rows, config) - 1).abs().mean() < 0.5


def test_its_checkpoint_is_loaded_again(
    workers: WorkerGroups, config: Any, model: Path, tmp_path: Path
) -> None:
    rows, critic = batch(), workers.critic.worker
    before = values(workers, rows, config)
    critic.save_checkpoint(str(tmp_path / "critic"), None, 1, None)
    ppo_step(rows, workers, config, n_rollouts=8, global_step=1)
    assert (values(workers, rows, config) - before).abs().max() > 1e-3
    critic.load_checkpoint(str(tmp_path / "critic"), None)
    assert torch.equal(values(workers, rows, config), before)
