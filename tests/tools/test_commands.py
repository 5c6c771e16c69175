"""`python -m agl_fast`: settings, samples, a store that agents join, recordings."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu]")
pytest.importorskip("agentlightning", reason="needs the extra [cpu] or [verl]")

import pyarrow
from pyarrow import parquet

import agl_fast
import support.verl_trainer_imports  # noqa: F401
from agl_fast.__main__ import main
from agl_fast.commands import train
from agl_fast.commands.dataset_files import load_samples
from agl_fast.commands.overrides import parse_overrides
from agl_fast.recording import RecordingWriter
from agl_fast.verl.membership import current_run
from support.daemon_runs import HELLO, SECONDS, hello, new_daemon
from support.fake_openai_server import FakeOpenAIServer
from support.verl_runs import processes_marked

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl and what it imports

TASKS = [{"question": "a", "n": 1}, {"question": "b", "n": None}]


def test_overrides_are_read_as_hydra_reads_them():
    assert parse_overrides(
        [
            "data.train_batch_size=8",
            "+data.new.key=[1,'two words',null]",
            "actor_rollout_ref.actor.optim.lr=1e-6",
            "trainer.logger=['console']",
            "algorithm.use_kl_in_reward=False",
            "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct",
            "++agentlightning.proxy={port:8123}",
        ]
    ) == {
        "data": {"train_batch_size": 8, "new": {"+key": [1, "two words", None]}},
        "actor_rollout_ref": {
            "actor": {"optim": {"lr": 1e-6}},
            "model": {"path": "Qwen/Qwen2.5-0.5B-Instruct"},
        },
        "trainer": {"logger": ["console"]},
        "algorithm": {"use_kl_in_reward": False},
        "agentlightning": {"+proxy": {"port": 8123}},
    }


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("no_value", "'no_value': expected key=value"),
        ("~data.train_files", "expected key=value with one value"),
        ("data.n=1,2", "expected key=value with one value"),
        ("a.b.c=1", "'a.b.c=1': b has a value already"),
    ],
)
def test_what_is_no_setting(argument, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_overrides(["a.b=1", argument])


def write(path: Path, samples: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(samples), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(samples))
    else:
        path.write_text("".join(json.dumps(each) + "\n" for each in samples))
    return str(path)


@pytest.mark.parametrize("suffix", ["parquet", "json", "jsonl"])
def test_samples_of_files(tmp_path, suffix):
    nested = [{"question": "c", "extra_info": {"index": 3, "tools": ["x"]}}]
    files = [write(tmp_path / f"a.{suffix}", TASKS), write(tmp_path / f"b.{suffix}", nested)]
    assert load_samples(files, "data.train_files") == [*TASKS, *nested]
    assert load_samples(files[0], "data.train_files") == TASKS


def test_a_separator_inside_a_line_of_jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "a\u2028b"}\r\n\n', "utf-8")
    assert load_samples(str(path), "data.train_files") == [{"question": "a\u2028b"}]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"a": 1}\n{"a":\n', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", "[1]\n", r"a.jsonl, line 1: expected an object, got \[1\]"),
        ("a.json", '{"a": 1}', "a.json: expected a list of objects, got a dict"),
        ("a.json", "[1]", "a.json: sample 0: expected an object, got 1"),
        ("a.csv", "a,b", "a.csv: expected one of .parquet, .json, .jsonl"),
    ],
)
def test_files_without_samples(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"data.val_files=.*{message}"):
        load_samples(str(tmp_path / name), "data.val_files")


def test_a_file_that_is_not_there():
    with pytest.raises(FileNotFoundError, match=r"data.train_files=nowhere.json: expected a file"):
        load_samples("nowhere.json", "data.train_files")


SETTINGS = [
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.model.path=some/model",
]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any, Any]]:
    """What would have been trained on, in place of training."""
    made: list[tuple[Any, Any, Any]] = []
    monkeypatch.setattr(train, "train_on", lambda *arguments: made.append(arguments))
    return made


def test_settings_and_files_become_a_run(tmp_path, runs):
    files = [write(tmp_path / "train.jsonl", TASKS), write(tmp_path / "val.json", TASKS[:1])]
    assert main([*SETTINGS, f"data.train_files={files[0]}", f"data.val_files=[{files[1]}]"]) == 0
    ((algorithm, train_samples, val_samples),) = runs
    assert isinstance(algorithm, agl_fast.VERL)
    assert algorithm.config.actor_rollout_ref.model.path == "some/model"
    assert (train_samples, val_samples) == (TASKS, TASKS[:1])


def test_verls_example_file_is_not_asked_for(tmp_path, runs, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    main([*SETTINGS, f"data.train_files={write(tmp_path / 'train.jsonl', TASKS)}"])
    assert runs[0][2] is None


AGENT = """
import sys
import agentlightning, openai

@agentlightning.rollout
def talk(task, llm: agentlightning.LLM) -> None:
    with openai.OpenAI(base_url=llm.endpoint, api_key="none") as client:
        messages = [{"role": "user", "content": task["question"]}]
        client.chat.completions.create(model=llm.model, messages=messages)
    agentlightning.emit_reward(0.5)

agentlightning.Trainer(
    runner={"type": "agentlightning.LitAgentRunner", "poll_interval": 0.2, "interval_jitter": 0.1},
    n_runners=2,
).fit(talk)
print("after", sys.argv[1:], __name__, "verl" in sys.modules, flush=True)
"""


class WithoutRay(agl_fast.VERL):
    """Its agents' calls become rows, and that is all."""

    fake: FakeOpenAIServer
    agents: Agents

    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        self.identity = current_run()
        daemon = new_daemon(self.get_store(), rollout_deadline_seconds=6 * SECONDS)
        try:
            self.agents.start(self.config.agentlightning.store_port)
            data = {"question": [sample["question"] for sample in train_dataset]}
            daemon.set_up_data_and_server(data, [self.fake.address])
            daemon.run_until_all_finished(verbose=False)
            self.rows, _ = daemon.get_train_data_batch(32, 32, "cpu", 1)
        finally:
            daemon.stop()


class Agents:
    """A program of agents that joins the store of a run."""

    def __init__(self, folder: Path, text: str, *options: str) -> None:
        self.program = folder / "my_agent.py"
        self.program.write_text(text)
        self.options = options
        self.mark = f"AGL_FAST_TEST={folder}"
        self.process: subprocess.Popen[str] | None = None

    def start(self, port: int) -> None:
        name, value = self.mark.split("=")
        command = ["-m", "agl_fast", "join", f"--port={port}", *self.options]
        self.process = subprocess.Popen(
            [sys.executable, *command, str(self.program), "one", "--two"],
            env={**os.environ, name: value, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def messages(self) -> Iterator[str]:
        """Lines of agl_fast, as they come."""
        assert self.process is not None
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("agl_fast: "):
                yield line.rstrip("\n")

    def ended(self) -> tuple[int, str, list[str]]:
        """Exit status, what was printed and agl_fast's messages; nothing of it runs on."""
        assert self.process is not None
        try:
            printed, errors = self.process.communicate(timeout=6 * SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        assert processes_marked(self.mark) == []
        said = [line for line in errors.splitlines() if line.startswith("agl_fast: ")]
        return self.process.returncode, printed, said


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


def test_agents_of_another_process_join_the_store_and_end_with_the_run(tmp_path):
    port = free_port()
    settings = [
        f"agentlightning.store_port={port}",
        "agentlightning.deadlines.store_answer_seconds=77",
    ]
    algorithm = WithoutRay(parse_overrides([*SETTINGS, *settings]))
    algorithm.agents = Agents(tmp_path, AGENT, "--wait=1")
    with FakeOpenAIServer() as algorithm.fake:
        algorithm.fake.respond = hello
        train.train_on(algorithm, TASKS, None)
    rows = algorithm.rows
    assert len(rows) == 4
    assert algorithm.identity.store_answer_seconds == 77.0  # what its runners learn
    assert rows.batch["responses"][0].tolist() == HELLO
    # Emitted by a program that knows nothing of agl_fast.
    assert rows.batch["token_level_scores"].sum(dim=1).tolist() == [0.5] * 4
    status, printed, said = algorithm.agents.ended()
    assert status == 0
    assert printed == "after ['one', '--two'] __main__ False\n"
    joined = said.pop(1)
    assert joined.startswith("agl_fast: the agents work for run ")
    assert joined.endswith(f") at http://localhost:{port}")
    assert said == [
        f"agl_fast: agents join the store at localhost:{port}",
        f"agl_fast: the store at localhost:{port} does not answer; the agents wait for it for 1 s",
        f"agl_fast: the store at localhost:{port} has been gone for 1 s: the run is over",
    ]


def test_agents_that_wait_for_a_store_are_ended(tmp_path):
    agents = Agents(tmp_path, AGENT)
    agents.start(port := free_port())
    assert agents.process is not None
    assert list(islice(agents.messages(), 2)) == [
        f"agl_fast: agents join the store at localhost:{port}",
        f"agl_fast: there is no store at localhost:{port} yet; the agents wait for it",
    ]
    agents.process.terminate()
    assert agents.ended()[0] == 128 + signal.SIGTERM


def test_a_script_that_is_not_there(capsys):
    with pytest.raises(SystemExit):
        main(["join", "nowhere.py"])
    assert "nowhere.py: expected a Python script, there is none" in capsys.readouterr().err


def test_a_port_that_is_taken(tmp_path):
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        algorithm = WithoutRay(parse_overrides([*SETTINGS, f"agentlightning.store_port={port}"]))
        with pytest.raises(OSError, match=f"port {port}: expected a free port on localhost") as no:
            train.train_on(algorithm, TASKS, None)
    assert "Set another one: agentlightning.store_port" in str(no.value)


def test_replay(tmp_path, capsys):
    calls = [agl_fast.Call([1, 2], [3, 4]), agl_fast.Call([1, 2, 3, 4, 5], [6])]
    path = tmp_path / "bug.jsonl"
    with RecordingWriter(path) as writer:
        writer.write(agl_fast.Rollout("r", "g", calls, 1.0))
    assert main(["replay", str(path)]) == 0
    assert "1 rollouts, 2 calls, 2 rows" in capsys.readouterr().out
    key = "agentlightning.trace_aggregator.trajectory_max_response_length"
    assert main(["replay", str(path), f"{key}=2", "--level", "trajectory"]) == 0
    shown = capsys.readouterr().out
    assert "1 rollouts, 2 calls, 1 rows (1×4)" in shown
    assert "33.3% truncated" in shown
    assert f"{key}=4" in shown
