"""`agl_fast.dry_run`: an agent's rows from any server that returns token ids."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import openai
import pytest

pytest.importorskip("agentlightning", reason="needs the extra [cpu] or [verl]")

import agl_fast
from agl_fast.__main__ import main
from agl_fast.recording import read_recording
from support.daemon_runs import HELLO, agentlightning, hello
from support.fake_openai_server import Answer, FakeOpenAIServer
from support.running_proxy import say
from support.same_rollouts import assert_same_rollouts

pytestmark = pytest.mark.filterwarnings("ignore")  # of agentlightning and what it imports


@pytest.fixture
def fake() -> Iterator[FakeOpenAIServer]:
    with FakeOpenAIServer() as server:
        server.respond = hello
        yield server


def converse(task, llm: agentlightning.LLM) -> float:
    if task["question"] == "fail":
        raise RuntimeError("the agent failed")
    with openai.OpenAI(base_url=llm.endpoint, api_key="none", max_retries=0) as client:
        client.chat.completions.create(model=llm.model, messages=say(task["question"]))
        conversation = say(task["question"], "hello", "and?")
        client.chat.completions.create(model=llm.model, messages=conversation)
    return float(len(task["question"]))


TASKS = [{"question": "a"}, {"question": "bb"}, {"question": "fail"}]


def test_rows_report_and_recording(fake, tmp_path):
    path = tmp_path / "dry.jsonl.gz"
    found = agl_fast.dry_run(converse, TASKS, f"{fake.url}/v1", rollouts_per_sample=2, record=path)
    assert [each.status for each in found.rollouts] == ["succeeded"] * 4 + ["failed"] * 2
    assert [each.reward for each in found.rollouts[:4]] == [1.0, 1.0, 2.0, 2.0]
    assert [call.response_ids.tolist() for call in found.rollouts[0].calls] == [HELLO, HELLO]
    assert found.batch is not None
    assert len(found.batch) == 4  # each pair of calls is one row
    assert found.batch.accounting.trained == 8 * len(HELLO)
    assert found.metrics["training/failed_rollouts"] == 2
    report = str(found)
    assert "6 rollouts: 4 succeeded, 2 failed" in report
    assert "rewards: 1.5 on average, 1 to 2" in report
    assert "2 of 2 groups have equal rewards" in report
    assert "4 rows of 8 calls" in report
    assert f"1 step sampled {8 * len(HELLO)} tokens in 8 calls: 100.0% trained." in report
    recording = read_recording(path)
    assert_same_rollouts(recording.rollouts, list(found.rollouts))
    assert recording.about["rows"]["max_response_length"] == 8192
    assert {body["model"] for body in fake.bodies()} == {"policy"}
    assert {body["temperature"] for body in fake.bodies()} == {1.0}


def test_what_limits_take_is_told(fake):
    found = agl_fast.dry_run(
        converse, TASKS[:1], fake.url, model="policy", max_response_length=len(HELLO)
    )
    assert "Limits took 50.0% of the tokens" in str(found)
    assert f"max_response_length={len(HELLO) * 2 + len('uand?' + chr(10))}" in str(found)


def test_a_server_without_token_ids(fake):
    fake.respond = lambda _: Answer(without=frozenset({"token_ids", "prompt_token_ids"}))
    found = agl_fast.dry_run(converse, TASKS[:1], fake.url, model="policy")
    assert found.metrics["training/rollouts_without_calls"] == len(found.rollouts)
    assert found.batch is None
    assert [each.status for each in found.rollouts] == ["failed"]
    assert "no rows: no rollout has a trainable call" in str(found)
    assert "1 answers had no token ids" in str(found)


@agentlightning.rollout
def judged(task, llm: agentlightning.LLM) -> None:
    converse(task, llm)
    agentlightning.emit_reward(0.25)


@pytest.mark.skipif(sys.platform != "linux", reason="runners are forked")
def test_processes_of_their_own(fake):
    tasks = [{"question": name} for name in ("a", "b", "c")]
    found = agl_fast.dry_run(judged, tasks, fake.url, model="policy", n_runners=2)
    assert [each.reward for each in found.rollouts] == [0.25] * 3


def test_an_endpoint_that_is_none():
    with pytest.raises(ConnectionError, match=r"endpoint='http://127.0.0.1:9' does not list its"):
        agl_fast.dry_run(converse, TASKS, "http://127.0.0.1:9")


def test_a_recording_is_not_overwritten(fake, tmp_path):
    path = tmp_path / "kept.jsonl"
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        agl_fast.dry_run(converse, TASKS, fake.url, model="policy", record=path)
    assert path.read_text() == "mine"
    assert fake.requests == []


AGENT = """
import openai


def ask(task, llm):
    with openai.OpenAI(base_url=llm.endpoint, api_key="none", max_retries=0) as client:
        message = {"role": "user", "content": task["question"]}
        client.chat.completions.create(model=llm.model, messages=[message])
    return 0.5
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    (tmp_path / "agent_of_a_file.py").write_text(AGENT)
    lines = "".join(json.dumps(task) + "\n" for task in TASKS)
    (tmp_path / "tasks.jsonl").write_text(lines)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize("agent", ["agent_of_a_file.py:ask", "agent_of_a_file:ask"])
def test_the_command_prints_the_report(agent, fake, files, capsys):
    assert main(["dry-run", agent, "tasks.jsonl", fake.url, "--n-tasks", "2"]) == 0
    printed = capsys.readouterr().out
    assert "2 rollouts: 2 succeeded" in printed
    assert "rewards: 0.5 on average" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["agent", "tasks.jsonl", "x"], "expected AGENT as FILE.py:NAME or MODULE:NAME"),
        (["none.py:ask", "tasks.jsonl", "x"], "none.py: expected a file, there is none"),
        (["agent_of_a_file.py:ask", "none.jsonl", "x"], "none.jsonl: expected a file"),
        (["agent_of_a_file.py:no", "tasks.jsonl", "x"], "agent_of_a_file.py has no 'no'"),
        (["no_module:ask", "tasks.jsonl", "x"], "No module named 'no_module'"),
        (
            ["agent_of_a_file.py:ask", "tasks.jsonl", "http://127.0.0.1:9"],
            "endpoint='http://127.0.0.1:9' does not list its models",
        ),
        (
            ["agent_of_a_file.py:ask", "tasks.jsonl", "x", "--model", "m", "--n-runners", "0"],
            "n_runners must be at least 1, got 0",
        ),
    ],
)
def test_what_the_command_cannot_do_is_one_line(arguments, message, files, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["dry-run", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
