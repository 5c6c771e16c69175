"""A run that records: what the daemon hands over, and what is said about it."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu] or [verl]")
pytest.importorskip("agentlightning", reason="needs the extra [cpu] or [verl]")

from omegaconf import OmegaConf

import agl_fast
import support.verl_trainer_imports  # noqa: F401
from agl_fast.recording import RunRecorder, read_recording
from agl_fast.training.run_recording import run_recorder
from agl_fast.verl.config import compose, differences
from agl_fast.verl.supervision.deadlines import default_deadlines
from agl_fast.verl.supervision.waits import Limit
from support.daemon_runs import HELLO, daemon_bench, new_daemon, new_store
from support.same_rollouts import assert_same_rollouts
from support.verl_settings import DOCUMENTED, documented

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl and what it imports


def talk(run) -> float:
    if run.input["question"] == "q1":
        raise RuntimeError("the agent failed")
    run.ask("hi", headers={"X-AGL-Agent": "talker"})
    run.ask("hi", "hello", "and?")
    return 0.5


def test_every_rollout_is_recorded_as_it_ended(tmp_path):
    finished = []
    recorder = RunRecorder(tmp_path)
    with daemon_bench(run_recorder=recorder) as bench:
        bench.daemon.rollout_finished = finished.append
        bench.daemon.policy_version = 4
        _, metrics = bench.train(talk)
        bench.run(talk, is_train=False)
    recorded = {path.name: read_recording(path) for path in sorted(recorder.folder.iterdir())}
    assert list(recorded) == ["train-000005.jsonl.gz", "val-000004.jsonl.gz"]
    rollouts = [each for recording in recorded.values() for each in recording.rollouts]
    assert_same_rollouts(rollouts, finished)
    assert [each.status for each in rollouts] == [
        *("succeeded", "succeeded", "failed", "failed"),
        *("succeeded", "failed"),
    ]
    first = rollouts[0]
    assert first.reward == 0.5
    assert first.sample["question"] == "q0"
    assert first.calls[1].response_ids.tolist() == HELLO
    assert first.calls[1].policy_version == 4
    assert first.calls[1].log_probs.tolist() == [-0.5] * len(HELLO)
    assert metrics["training/recording/lost"] == 0
    assert recorder.counts == {"written": 6, "lost": 0}


def test_what_the_disk_does_not_take_in_time_is_lost_with_a_warning(tmp_path, monkeypatch, caplog):
    go_on = threading.Event()

    class Slow(RunRecorder):
        def _write(self, *arguments) -> None:
            go_on.wait(30)
            super()._write(*arguments)

    recorder = Slow(tmp_path)
    deadlines = replace(default_deadlines(), record=Limit(0.1))
    with daemon_bench(run_recorder=recorder, deadlines=deadlines) as bench:
        bench.train(talk)
        bench.daemon.stop()
    go_on.set()
    assert recorder.counts["lost"] == 3  # the first one is being written
    (line,) = [line for line in caplog.messages if "Rollouts are not recorded" in line]
    assert "they were not written within 0.1 s" in line


def test_the_proxy_starts_and_stops_within_the_limits_of_the_run():
    daemon = new_daemon(new_store(), deadlines=default_deadlines())
    assert daemon.llm_proxy.start_limit == default_deadlines().enqueue
    assert daemon.llm_proxy.stop_limit == default_deadlines().cancel


def test_the_same_rows_of_the_recording(tmp_path):
    recorder = RunRecorder(tmp_path)
    with daemon_bench(run_recorder=recorder) as bench:
        rows, _ = bench.train(talk)
    (path,) = recorder.folder.iterdir()
    succeeded = [each for each in read_recording(path).rollouts if each.status == "succeeded"]
    batch = agl_fast.build_batch(
        succeeded,
        level="trajectory",
        max_prompt_length=64,
        max_response_length=64,
        pad_token_id=0,
        trim=True,
        call_index=True,
    )
    assert set(batch.tensors) == set(rows.batch.keys())
    for name, values in batch.tensors.items():
        assert (values == rows.batch[name]).all(), name


def like(**changes):
    """The documented settings, less those of micro-batches, with changes."""
    settings = documented(**changes)
    given = {key.replace("__", ".") for key in changes}
    for part, key in BATCHES:
        if f"actor_rollout_ref.{part}.{key}" not in given:
            del settings["actor_rollout_ref"][part][key]
    return settings


BATCHES = (
    ("actor", "ppo_micro_batch_size_per_gpu"),
    ("rollout", "log_prob_micro_batch_size_per_gpu"),
    ("ref", "log_prob_micro_batch_size_per_gpu"),
)
ACTOR, ROLLOUT = "actor_rollout_ref__actor__", "actor_rollout_ref__rollout__"
REFERENCE = "actor_rollout_ref__ref__"
SETTINGS = {
    "documented": DOCUMENTED,
    "nothing of micro-batches": like(),
    "a reference by rows beside a dynamic actor": like(
        **{
            f"{ACTOR}use_dynamic_bsz": True,
            f"{ACTOR}use_kl_loss": True,
            f"{REFERENCE}log_prob_use_dynamic_bsz": False,
            f"{REFERENCE}log_prob_micro_batch_size_per_gpu": 4,
        }
    ),
    "defaults that a CPU would replace": like(
        **{f"{ROLLOUT}gpu_memory_utilization": 0.5, f"{ROLLOUT}enforce_eager": False}
    ),
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_give_the_configuration_again(name, device):
    config = compose(
        {**SETTINGS[name], "agentlightning": {"proxy": {"api_key": "secret"}, "record_dir": "r"}},
        device=device,
    ).config
    again = compose(differences(config), device=device).config
    assert again.agentlightning.proxy.api_key is None
    again.agentlightning.proxy.api_key = "secret"
    resolved = OmegaConf.to_container(config, resolve=True)
    assert OmegaConf.to_container(again, resolve=True) == resolved


def test_nothing_is_recorded_unless_asked(tmp_path):
    assert run_recorder(compose(documented()).config, 0) is None


def test_a_recording_says_how_its_rows_are_built(tmp_path):
    settings = documented()
    settings["agentlightning"] = {
        "record_dir": str(tmp_path),
        "trace_aggregator": {"level": "trajectory", "trajectory_max_response_length": 77},
    }
    recorder = run_recorder(compose(settings).config, 5)
    recorder.record(agl_fast.Rollout("r", "g", []), 0, is_train=True)
    recorder.close()
    (path,) = recorder.folder.iterdir()
    about = read_recording(path).about
    assert about["rows"] == {
        "level": "trajectory",
        "max_prompt_length": 2048,
        "max_response_length": 77,
        "max_total_length": None,
        "overlong_prompt": None,
        "truncated_rollouts": "train",
        "tree_max_tokens": 16384,
        "trim": True,
        "pad_token_id": 5,
        "reward_fillna_value": 0.0,
    }
    assert about["settings"]["agentlightning"]["record_dir"] == str(tmp_path)
