"""The quickstart from end to end: verl's trainer, Ray, FSDP2 and vLLM on the CPU."""

from __future__ import annotations

import json
import os
import signal
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

N_STEPS = 4
TIMEOUT_SECONDS = 1200


@dataclass(frozen=True)
class FinishedRun:
    returncode: int
    console: str
    folder: Path
    run_id: str

    def steps(self) -> list[dict[str, Any]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def run_quickstart(runs: Path, *arguments: str, **environment: str) -> FinishedRun:
    started = subprocess.Popen(
        [sys.executable, "-m", "agl_fast.verl.quickstart", "--runs", str(runs), *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    # It cleans up when it is asked to end, not when it is killed.
    ask_to_end = threading.Timer(TIMEOUT_SECONDS - 120, started.send_signal, [signal.SIGTERM])
    ask_to_end.start()
    try:
        console, _ = started.communicate()
    finally:
        ask_to_end.cancel()
    (folder,) = runs.iterdir()
    run_id = (folder / "run_id").read_text()
    return FinishedRun(started.returncode, console, folder, run_id)


@pytest.mark.timeout(TIMEOUT_SECONDS)
def test_quickstart_trains_and_leaves_nothing_running(tmp_path: Path) -> None:
    segments = leftovers.shared_memory_segments()
    run = run_quickstart(tmp_path, "--steps", str(N_STEPS), "--min-rise", "-1")
    assert run.returncode == 0, run.console
    assert "nothing is left running" in run.console

    steps = run.steps()
    assert [step["step"] for step in steps] == list(range(1, N_STEPS + 1))
    for step in steps:
        assert step["correlation"] > 0.99
        assert 0.0 <= step["reward"] <= 1.0
        assert step["rollouts"] == 64
        assert step["tokens"] > 0
        # One row of a rollout whose calls merged, two of one that drifted.
        assert step["rows"] == 2 * step["rollouts"] - step["merged"]
        assert step["merged"] > step["rollouts"] // 2
        assert step["actor_metrics"]["actor/grad_norm"] > 0.0

    assert leftovers.processes_of_run(run.run_id) == []
    assert not {name for name in leftovers.shared_memory_segments() - segments if "psm_" in name}


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_SECONDS)
def test_a_weight_sync_that_fails_stops_the_run(tmp_path: Path) -> None:
    worker = "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls"
    run = run_quickstart(
        tmp_path,
        f"{worker}=failing_sync.FailingSync",
        "quickstart.seconds.weight_sync=20",
        PYTHONPATH=str(Path(__file__).parent / "data" / "quickstart"),
    )
    assert run.returncode == 1
    assert "first weight sync did not finish within 20 s" in run.console
    assert leftovers.processes_of_run(run.run_id) == []
