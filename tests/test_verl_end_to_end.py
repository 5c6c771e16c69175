"""VERL from end to end on the CPU: an agent, two runners, Ray, FSDP2, vLLM, checkpoint, resume."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu]")
pytest.importorskip("vllm", reason="needs the extra [cpu]")

from agl_fast.verl import leftovers

TIMEOUT_SECONDS = 1200
SCRIPT = Path(__file__).with_name("verl_run.py")
N_ROLLOUTS = 16
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT_SECONDS)]


@dataclass(frozen=True)
class Finished:
    returncode: int
    output: str
    segments_left: set[str]
    processes_left: list[str]


def run(folder: Path, *arguments: str) -> Finished:
    segments = leftovers.shared_memory_segments()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    mark = f"AGL_FAST_TEST={folder}"
    started = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder), "--port", str(port), *arguments],
        env={**os.environ, "AGL_FAST_TEST": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    ask_to_end = threading.Timer(TIMEOUT_SECONDS - 120, started.send_signal, [signal.SIGINT])
    ask_to_end.start()
    try:
        output, _ = started.communicate()
    finally:
        ask_to_end.cancel()
    return Finished(
        started.returncode,
        output,
        leftovers.shared_memory_segments() - segments,
        processes_marked(mark),
    )


def processes_marked(mark: str) -> list[str]:
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environment.read_bytes():
                found.append((environment.parent / "comm").read_text())
        except OSError:
            continue  # ended meanwhile
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verl", numbered=True)


@pytest.fixture(scope="module")
def trained(folder: Path) -> Finished:
    """Three steps from scratch."""
    return run(folder, "--steps", "3")


@pytest.fixture(scope="module")
def resumed(folder: Path, trained: Finished) -> Finished:
    """A fourth step from the checkpoint; at the fifth the vLLM engine is killed."""
    return run(folder, "--steps", "6", "--kill-server", "5")


def test_three_steps_train_and_leave_nothing(folder, trained):
    assert trained.returncode == 0, trained.output[-4000:]
    assert trained.processes_left == []
    assert trained.segments_left == set()
    logged = lines(folder / "metrics-3.jsonl")
    assert [line["step"] for line in logged] == [0, 1, 2, 3]
    for line in logged[1:]:
        metrics = line["data"]
        assert metrics["training/n_mini_batches"] == 2
        assert metrics["training/n_rollouts_w_reward"] == N_ROLLOUTS
        assert metrics["training/audit/n_tokens"] == metrics["training/tokens/trained"]
        assert metrics["training/audit/prob_diff_max"] < 1e-4
        assert metrics["training/audit/logprob_diff/all/p99"] < 1e-4
        assert metrics["training/audit/logprob_diff/after_observation/p99"] < 1e-4
        assert metrics["actor/grad_norm"] > 0
        # The agent asks for another temperature, training samples with its own.
        assert metrics["training/proxy/sampling_overridden"] == 2 * N_ROLLOUTS


def test_names_of_agent_lightning_and_verl_are_there(folder, trained):
    first, *_, last = (line["data"] for line in lines(folder / "metrics-3.jsonl"))
    for name in ("n_rollouts", "n_rollouts_w_trace", "n_rollouts_w_reward", "reward"):
        assert f"val/{name}" in first
        assert f"val/other/{name}" in last
    assert first["val/n_rollouts"] == last["val/n_rollouts"] == 5  # of two batches
    for name in (
        "training/reward",
        "training/n_triplets",
        "training/n_triplets_prompt_too_long",
        "training/n_triplets_dropped_remainder",
        "training/global_step",
        "training/epoch",
        "critic/score/mean_before_processing",
        "critic/advantages/max_after_processing",
        "response_length/mean_after_processing",
        "actor/pg_loss",
        "actor/entropy_loss",
        "timing_s/step",
        "timing_s/gen",
        "timing_s/old_log_prob",
        "timing_s/update_actor",
        "perf/throughput",
        "perf/total_num_tokens",
    ):
        assert name in last, name


def test_rows_are_those_of_the_recorded_calls(folder, trained):
    # verl_run.py has held each batch against agl_fast.reference.
    batches = [batch for batch in lines(folder / "batches.jsonl") if batch["step"] <= 3]
    assert [batch["step"] for batch in batches] == [1, 2, 3]
    for batch in batches:
        assert len(batch["rollouts"]) == N_ROLLOUTS
        assert N_ROLLOUTS <= batch["rows"] <= 2 * N_ROLLOUTS
        assert len({data_id for _, data_id, _, _ in batch["rollouts"]}) == 4
        assert all(n_calls == 2 for *_, n_calls in batch["rollouts"])
        assert batch["policy_versions"] == [batch["step"] - 1]


def test_one_checkpoint_is_kept(folder, trained):
    checkpoints = folder / "checkpoints"
    assert [path.parent.name for path in checkpoints.glob("global_step_*/actor")] == [
        "global_step_3"
    ]


def test_a_run_resumes_and_ends_with_the_cause_when_the_server_dies(folder, resumed):
    steps = [batch["step"] for batch in lines(folder / "batches.jsonl")]
    assert steps == [1, 2, 3, 4]
    logged = lines(folder / "metrics-6.jsonl")
    assert [line["step"] for line in logged] == [3, 4]
    assert logged[1]["data"]["training/audit/prob_diff_max"] < 1e-4
    assert resumed.returncode != 0
    assert "vLLM server" in resumed.output
    assert "is dead" in resumed.output
    assert resumed.processes_left == []
    assert resumed.segments_left == set()
