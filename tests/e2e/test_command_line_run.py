"""`python -m agl_fast key=value …` and agents that join it, and its recordings replayed."""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu]")
pytest.importorskip("vllm", reason="needs the extra [cpu]")

import support.verl_trainer_imports  # noqa: F401
from agl_fast.__main__ import main
from agl_fast.recording import read_recording
from agl_fast.tools.replay import replay
from agl_fast.verl.supervision import leftovers
from support import two_call_task
from support.tiny_model import make_tiny_model
from support.verl_runs import (
    TIMEOUT_SECONDS,
    abandoned_segments,
    environment,
    lines,
    processes_marked,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * TIMEOUT_SECONDS),
    pytest.mark.filterwarnings("ignore"),  # of verl and what it imports
]
P, R = 64, 96
N_ROLLOUTS = 8

AGENT = """
import agentlightning
import openai

@agentlightning.rollout
def count(task, llm: agentlightning.LLM) -> None:
    messages, answers = [], []
    with openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none") as client:
        for content in (f"count {task['subject']}s", "count on"):
            messages.append({"role": "user", "content": content})
            answer = client.chat.completions.create(
                model=llm.model, messages=messages, max_tokens=12
            )
            answers.append(answer.choices[0].message.content or "")
            messages.append({"role": "assistant", "content": answers[-1]})
    digits = [sum(map(str.isdigit, answer)) / max(1, len(answer)) for answer in answers]
    agentlightning.emit_reward(sum(digits) / len(digits))

agentlightning.Trainer(
    n_runners=2,
    runner={"type": "agentlightning.LitAgentRunner", "poll_interval": 0.2, "interval_jitter": 0.1},
).fit(count)
print("the agents have ended")
"""


@dataclass(frozen=True)
class Run:
    """What a run and its agents left.

    Attributes:
        statuses: exit statuses of the run and of the program of the agents.
        logged: metrics by step.
        recordings: files by name.
    """

    folder: Path
    statuses: tuple[int, int]
    output: str
    agents_output: str
    processes_left: list[str]
    segments_left: set[str]

    @property
    def logged(self) -> dict[int, dict[str, Any]]:
        return {line["step"]: line["data"] for line in lines(self.folder / "metrics.jsonl")}

    @property
    def recordings(self) -> dict[str, Path]:
        return {path.name: path for path in (self.folder / "recordings").glob("*/*")}


def settings(folder: Path, port: int) -> list[str]:
    of = "actor_rollout_ref"
    rows = "agentlightning.trace_aggregator"
    return [
        f"{of}.model.path={folder / 'model'}",
        f"data.train_files={folder / 'train.jsonl'}",
        f"data.val_files=[{folder / 'val.json'}]",
        "data.train_batch_size=4",
        f"data.max_prompt_length={P}",
        f"data.max_response_length={R}",
        "algorithm.adv_estimator=grpo",
        f"{of}.rollout.n=2",
        f"{of}.actor.ppo_mini_batch_size=2",
        f"{of}.actor.optim.lr=0.003",
        f"{rows}.level=trajectory",
        f"{rows}.trajectory_max_prompt_length={P}",
        f"{rows}.trajectory_max_response_length={R}",
        f"agentlightning.store_port={port}",
        f"agentlightning.record_dir={folder / 'recordings'}",
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        "trainer.save_freq=-1",
        "trainer.logger=[console,file]",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps."""
    folder = tmp_path_factory.mktemp("command", numbered=True)
    make_tiny_model(folder / "model", two_call_task.corpus(), max_length=P + R, seed=1)
    tasks = [{"subject": subject, "data_source": "t"} for subject in two_call_task.SUBJECTS]
    (folder / "train.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (folder / "val.json").write_text(json.dumps(tasks[:3]))
    (folder / "my_agent.py").write_text(AGENT)
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    segments = leftovers.shared_memory_segments()
    environ = environment(folder, VERL_FILE_LOGGER_PATH=str(folder / "metrics.jsonl"))
    command = [sys.executable, "-m", "agl_fast"]
    join = ["join", f"--port={port}", "--wait=5", str(folder / "my_agent.py")]
    # They join before there is a store.
    agents = started([*command, *join], folder / "agents.log", environ)
    trained = started([*command, *settings(folder, port)], folder / "run.log", environ)
    try:
        statuses = trained.wait(TIMEOUT_SECONDS), agents.wait(120)
    finally:
        for process in (trained, agents):
            if process.poll() is None:
                process.terminate()
                process.wait(120)
    return Run(
        folder,
        statuses,
        (folder / "run.log").read_text(errors="replace"),
        (folder / "agents.log").read_text(errors="replace"),
        processes_marked(f"AGL_FAST_TEST={folder}"),
        abandoned_segments(segments),
    )


def started(command: list[str], log: Path, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(command, env=environ, stdout=out, stderr=subprocess.STDOUT)


def test_it_trains_validates_and_both_programs_end(run):
    assert run.statuses == (0, 0), run.output[-4000:] + run.agents_output[-2000:]
    assert run.processes_left == []
    assert run.segments_left == set()
    assert list(run.logged) == [0, 1, 2]
    assert run.logged[0]["val/n_rollouts_w_reward"] == 3
    assert run.logged[2]["val/n_rollouts_w_reward"] == 3
    for step in (1, 2):
        assert run.logged[step]["training/n_rollouts_w_reward"] == N_ROLLOUTS
        assert run.logged[step]["training/audit/prob_diff_max"] < 1e-4
        assert run.logged[step]["training/recording/lost"] == 0
    assert "the agents have ended" in run.agents_output
    assert "the run is over" in run.agents_output


def test_every_step_and_validation_is_recorded(run):
    recordings = {name: read_recording(path) for name, path in sorted(run.recordings.items())}
    assert {name: len(each.rollouts) for name, each in recordings.items()} == {
        "train-000001.jsonl.gz": N_ROLLOUTS,
        "train-000002.jsonl.gz": N_ROLLOUTS,
        "val-000000.jsonl.gz": 3,
        "val-000002.jsonl.gz": 3,
    }
    versions = {
        name: {call.policy_version for rollout in each.rollouts for call in rollout.calls}
        for name, each in recordings.items()
    }
    assert list(versions.values()) == [{0}, {1}, {0}, {2}]


# Of the rows and what is in them; others tell of the process, the proxy or the step.
ROWS = re.compile(
    r"training/(reward|n_\w+|tokens/\w+|tokens/dropped/.*|rows_per_rollout|mismatches/.*|skipped.*)$"
)


@pytest.mark.parametrize("step", [1, 2])
def test_a_replay_gives_the_rows_of_the_run(run, step, capsys):
    path = run.recordings[f"train-{step:06}.jsonl.gz"]
    found, logged = replay(path).metrics, run.logged[step]
    compared = {name for name in logged if ROWS.match(name)} & found.keys()
    assert {"training/reward", "training/n_triplets", "training/tokens/trained"} <= compared
    for name in compared:
        assert found[name] == pytest.approx(logged[name], rel=1e-6), name
    assert main(["replay", str(path)]) == 0
    assert f"training/reward: {logged['training/reward']:.6g}\n" in capsys.readouterr().out


def test_a_replay_takes_the_step_of_the_run(run):
    path, logged = run.recordings["train-000001.jsonl.gz"], run.logged[1]
    found = replay(path, model=run.folder / "model").metrics
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "actor/ppo_kl"):
        assert math.isfinite(logged[name])
        assert found[name] == pytest.approx(logged[name], rel=1e-4, abs=1e-6), name
    assert found["training/n_mini_batches"] == logged["training/n_mini_batches"] == 2
