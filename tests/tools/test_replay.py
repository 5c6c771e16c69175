"""Recordings replayed: the run's rows and metrics again, and one step, the same every time."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from support.paths import DATA

pytest.importorskip("verl", reason="needs the extra [cpu]")
pytest.importorskip("agentlightning", reason="needs the extra [cpu] or [verl]")

import torch

import agl_fast
import support.verl_trainer_imports  # noqa: F401
from agl_fast.recording import RecordingWriter, RunRecorder
from agl_fast.tools.replay import Replay, replay
from support.daemon_runs import daemon_bench
from support.tiny_model import make_tiny_model

N_GROUPS, GROUP_SIZE = 2, 3

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl and what it imports


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, ["count from one to ten"], max_length=256, seed=3)
    return folder


def rollouts(n_groups: int = N_GROUPS) -> list[agl_fast.Rollout]:
    chances = random.Random(4)

    def ids(n: int) -> list[int]:
        return [chances.randrange(5, 100) for _ in range(n)]

    made = []
    for number in range(n_groups * GROUP_SIZE):
        first = agl_fast.Call(ids(6), ids(5))
        prompt = [*first.prompt_ids, *first.response_ids, *ids(3)]
        calls = [first, agl_fast.Call(prompt, ids(4)), agl_fast.Call(ids(4), ids(3))]
        group = f"group {number // GROUP_SIZE}"
        made.append(agl_fast.Rollout(f"rollout {number}", group, calls, chances.random()))
    return made


SETTINGS: dict[str, Any] = {
    "algorithm": {"adv_estimator": "rloo"},
    "data": {"train_batch_size": N_GROUPS},
    "actor_rollout_ref": {
        "model": {"path": "what/the/run/had", "enable_gradient_checkpointing": False},
        "actor": {
            "ppo_mini_batch_size": 1,
            "ppo_micro_batch_size_per_gpu": 2,
            "optim": {"lr": 0.01},
        },
        "rollout": {"n": GROUP_SIZE, "log_prob_micro_batch_size_per_gpu": 2},
    },
    "agentlightning": {
        "trace_aggregator": {
            "level": "trajectory",
            "trajectory_max_prompt_length": 16,
            "trajectory_max_response_length": 32,
        }
    },
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "train-000007.jsonl.gz"
    about = {"step": 7, "rows": {"pad_token_id": 2}, "settings": SETTINGS}
    with RecordingWriter(path, about) as writer:
        writer.write_many(rollouts())
    return path


@pytest.fixture(scope="module")
def taken(path: Path, model: Path) -> Replay:
    return replay(path, model=model)


def test_a_step_learns(taken: Replay, model: Path) -> None:
    from transformers import AutoModelForCausalLM

    before = dict(AutoModelForCausalLM.from_pretrained(model).named_parameters())
    moved = [
        float((weights - before[name].detach()).abs().max())
        for name, weights in taken.weights.items()
    ]
    assert min(moved) > 0
    assert taken.metrics["training/n_mini_batches"] == N_GROUPS
    assert taken.metrics["training/n_triplets"] == 2 * N_GROUPS * GROUP_SIZE
    assert taken.metrics["actor/grad_norm"] > 0
    assert f"sha256 {taken.fingerprint}" in str(taken)


def test_the_same_step_is_the_same_bit_for_bit(taken: Replay, path: Path, model: Path) -> None:
    again = replay(path, model=model)
    assert again.fingerprint == taken.fingerprint
    assert again.weights.keys() == taken.weights.keys()
    for name, weights in again.weights.items():
        assert torch.equal(weights, taken.weights[name]), name
    for name, value in again.metrics.items():
        assert "perf/" in name or value == taken.metrics[name], name


def test_other_settings_are_another_step(taken: Replay, path: Path, model: Path) -> None:
    overrides = {"actor_rollout_ref": {"actor": {"optim": {"lr": 0.02}}}}
    assert replay(path, overrides, model=model).fingerprint != taken.fingerprint


def test_a_step_on_trees(taken: Replay, path: Path, model: Path) -> None:
    """The same calls; only the order of sums is another one."""
    overrides = {
        "agentlightning": {"trace_aggregator": {"level": "tree", "tree_max_tokens": 64}},
        "actor_rollout_ref": {"model": {"use_remove_padding": True}},
    }
    found = replay(path, overrides, model=model)
    assert len(found.batch) == N_GROUPS * GROUP_SIZE
    for name in ("actor/grad_norm", "actor/entropy"):
        assert found.metrics[name] == pytest.approx(taken.metrics[name], rel=1e-3)


def test_a_reference_policy(path: Path, model: Path) -> None:
    parts = {"actor": {"use_kl_loss": True}, "ref": {"log_prob_micro_batch_size_per_gpu": 2}}
    found = replay(path, {"actor_rollout_ref": parts}, model=model)
    assert "actor/kl_loss" in found.metrics


def test_rows_are_those_of_the_run(path: Path) -> None:
    found = replay(path)
    expected = agl_fast.build_batch(
        rollouts(),
        level="trajectory",
        max_prompt_length=16,
        max_response_length=32,
        pad_token_id=2,
        trim=True,
        call_index=True,
    )
    for name, values in expected.tensors.items():
        assert torch.equal(values, found.batch.tensors[name]), name
    assert found.fingerprint is None
    assert found.metrics["training/reward"] == expected.metrics["training/reward"]
    assert f"{path}: 6 rollouts, 18 calls, 12 rows" in str(found)
    assert "100.0% trained" in str(found)


def test_another_level(path: Path) -> None:
    overrides = {"agentlightning": {"trace_aggregator": {"level": "transition"}}}
    assert len(replay(path, overrides).batch) == 18


def test_token_traces() -> None:
    found = replay(DATA / "swe_plain.jsonl.gz")
    assert found.metrics["training/n_rollouts"] == 22


def test_a_daemons_recording(tmp_path: Path) -> None:
    """Failed rollouts leave their groups as they did in the run."""

    def talk(run: Any) -> float:
        if run.input["question"] == "q1":
            raise RuntimeError("the agent failed")
        run.ask("hi")
        return 1.0

    recorder = RunRecorder(tmp_path, {"rows": {"level": "trajectory"}})
    with daemon_bench(run_recorder=recorder) as bench:
        rows, metrics = bench.train(talk)
    (path,) = recorder.folder.iterdir()
    found = replay(path)
    for name, values in found.batch.tensors.items():
        assert torch.equal(values, rows.batch[name]), name
    for name, value in found.metrics.items():
        assert value == metrics[name], name
    assert found.metrics["training/skipped_rollouts/failed"] == 2


def test_a_critic_is_refused(path: Path, model: Path) -> None:
    overrides = {"algorithm": {"adv_estimator": "gae"}}
    with pytest.raises(ValueError, match="expected no critic"):
        replay(path, overrides, model=model)
