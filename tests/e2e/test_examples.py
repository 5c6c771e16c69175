"""Each example's agent against scripted answers; and a run of training with all of them."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from support.paths import ROOT, SUPPORT

pytest.importorskip("openai", reason="needs the extra [cpu]")

from agl_fast import Call, Rollout
from agl_fast.verl.supervision import leftovers
from examples import calculator, multi_agent, running, sql_agent
from examples.running import Example
from support.fake_openai_server import Answer, FakeOpenAIServer, Request
from support.verl_runs import (
    TIMEOUT_SECONDS,
    abandoned_segments,
    environment,
    lines,
    processes_marked,
)

NAMES = ("calculator", "sql_agent", "multi_agent", "openai_agents")


def example(name: str) -> Example:
    if name == "openai_agents":
        pytest.importorskip("agents", reason="needs the extra [examples]")
    return importlib.import_module(f"examples.{name}").EXAMPLE


def calling(name: str, **arguments: Any) -> Answer:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"index": 0, "id": "call-1", "type": "function", "function": function}
    return Answer(text="", tool_calls=[call], finish_reason="tool_calls")


def played(name: str, task: dict[str, Any], *answers: Answer) -> tuple[float, list[Request]]:
    """The agent's reward and what it asked, with as many answers as it needs."""
    with FakeOpenAIServer() as fake:
        fake.answer_next(*answers)
        llm = SimpleNamespace(endpoint=f"{fake.url}/v1", api_key=None, model="policy")
        reward = asyncio.run(example(name).agent(task, llm))
        assert len(fake.requests) == len(answers)
        return reward, fake.requests


def last_message(request: Request) -> str:
    return request.body["messages"][-1]["content"]


def agents_in(requests: list[Request]) -> list[str | None]:
    headers = [{key.lower(): value for key, value in each.headers.items()} for each in requests]
    return [each.get("x-agl-agent") for each in headers]


@pytest.mark.parametrize("name", NAMES)
def test_tasks_follow_the_seed(name):
    tasks = example(name).tasks
    assert tasks(5, 1) == tasks(5, 1) != tasks(5, 2)
    assert json.loads(json.dumps(tasks(5, 1))) == tasks(5, 1)
    assert len({task["data_source"] for task in tasks(5, 1)}) == 1


@pytest.mark.parametrize("name", NAMES)
def test_lessons_end_with_what_the_assistant_says(name):
    for lesson in example(name).lessons:
        messages = lesson.conversation(random.Random(1))
        assert messages[0]["role"] == "system"
        assert messages[-1]["role"] == "assistant"


PRODUCT = {"expression": "6 * 7", "result": 42}


@pytest.mark.parametrize(("said", "reward"), [(" 42\n", 1.0), ("41", 0.0)])
def test_calculator(said, reward):
    found, requests = played(
        "calculator", PRODUCT, calling("calculate", expression="6 * 7"), Answer(text=said)
    )
    assert found == reward
    assert last_message(requests[1]) == "42"
    assert requests[1].body["messages"][:2] == requests[0].body["messages"]


def test_calculator_ends_after_its_calls():
    answers = [calling("calculate", expression="1")] * calculator.MAX_CALLS
    assert played("calculator", PRODUCT, *answers)[0] == 0.0


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2 + 3 * -4", "-10"),
        ("2 ** 3", "error: expected +, -, * and integers"),
        ("open('x')", "error: expected +, -, * and integers"),
        ("1.5", "error: expected +, -, * and integers"),
        ("*".join(["999"] * 9), "error: too large"),
        ("(" * 500, "error: "),
        ("1 +", "error: "),
    ],
)
def test_calculator_works_out_integers_and_nothing_else(expression, result):
    assert calculator.calculated(json.dumps({"expression": expression})).startswith(result)


@pytest.mark.parametrize("arguments", ["{", "3", "{}", '{"expression": 3}'])
def test_calculator_takes_wrong_arguments(arguments):
    assert calculator.calculated(arguments).startswith("error: ")


QUESTION = {"question": "Who wrote Dune?", "query": "SELECT author FROM books WHERE title = 'Dune'"}


def test_sql_agent_writes_checks_and_rewrites():
    answers = ["SELECT writer FROM books", "No such column", f"```sql\n{QUESTION['query']}\n```"]
    reward, requests = played(
        "sql_agent", QUESTION, *(Answer(text=each) for each in [*answers, "correct."])
    )
    assert reward == 1.0
    assert agents_in(requests) == ["writer", "checker", "writer", "checker"]
    assert "no such column: writer" in last_message(requests[1])
    assert "No such column" in last_message(requests[2])
    # What the writer sees begins with all it has seen and said.
    seen = [*requests[0].body["messages"], {"role": "assistant", "content": answers[0]}]
    assert requests[2].body["messages"][: len(seen)] == seen
    assert "[('Bo',)]" in last_message(requests[3])


def test_sql_agent_gives_the_last_query_it_may_write():
    wrong = [Answer(text="SELECT 1"), Answer(text="wrong")]
    *_, last = wrong * (sql_agent.MAX_QUERIES - 1), Answer(text=QUESTION["query"])
    answers = [*wrong * (sql_agent.MAX_QUERIES - 1), last]
    assert played("sql_agent", QUESTION, *answers)[0] == 1.0


@pytest.mark.parametrize(
    "query",
    [
        "SELECT author FROM books",
        "DROP TABLE books",
        "PRAGMA user_version = 1",
        "ATTACH ':memory:' AS other",
        "SELECT load_extension('x')",
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n",
        "SELECT count(*) FROM books a, books b, books c, books d, books e, books f, books g",
        "SELECT 1; SELECT 2",
        "SELECT '\0'",
        "nonsense",
        "",
    ],
)
def test_no_reward_for_other_queries_and_no_harm(query):
    answers = [Answer(text=query), Answer(text="CORRECT")]
    assert played("sql_agent", QUESTION, *answers)[0] == 0.0
    assert sql_agent.outcome(QUESTION["query"]) == "[('Bo',)]"


def test_each_question_has_an_answer():
    for task in sql_agent.tasks(60, 1):
        assert sql_agent.outcome(task["query"]).startswith("[(") or "pages >" in task["query"]


ORDER = {"order": ["pen", "cup"], "prices": {"pen": 2, "cup": 5, "map": 9}, "sum": 7}


def test_multi_agent_asks_its_sub_agent():
    reward, requests = played(
        "multi_agent",
        ORDER,
        calling("ask_storekeeper", item="pen"),
        Answer(text="2"),
        calling("ask_storekeeper", item="cup"),
        Answer(text="five"),
        Answer(text="7"),
    )
    assert reward == 1.0
    assert agents_in(requests) == ["clerk", "storekeeper", "clerk", "storekeeper", "clerk"]
    assert last_message(requests[1]).endswith("What does a pen cost?")
    assert [last_message(requests[n]) for n in (2, 4)] == ["2", "five"]


@pytest.mark.parametrize("arguments", ["{", "3", "{}"])
def test_multi_agent_takes_wrong_arguments(arguments):
    assert multi_agent.item_in(arguments) == arguments


@pytest.mark.parametrize(
    ("hook", "agents", "trained"),
    [
        (multi_agent.train_the_clerk, ["clerk", "storekeeper", "clerk"], [True, False, True]),
        (sql_agent.train_the_writer, ["writer", "checker", "writer"], [True, False, True]),
    ],
)
def test_hooks_train_one_agent(hook, agents, trained):
    calls = [Call([n], [n], agent=agent) for n, agent in enumerate(agents)]
    found = hook(Rollout("r", "d", calls, reward=1.0))
    assert [call.trainable for call in found.calls] == trained


SIZES = {"sizes": {"Aston": 3, "Corby": 8}}


@pytest.mark.parametrize(
    ("last", "reward"),
    [
        (Answer(text="Corby"), 1.0),
        (Answer(text="Aston"), 0.0),
        (calling("no_such_tool"), 0.0),
    ],
)
def test_openai_agents(last, reward):
    found, requests = played("openai_agents", SIZES, calling("size_of", place="Corby"), last)
    assert found == reward
    assert last_message(requests[1]) == "8"


def test_openai_agents_ends_after_its_turns():
    answers = [calling("size_of", place="Rome")] * 4
    reward, requests = played("openai_agents", SIZES, *answers)
    assert reward == 0.0
    assert last_message(requests[1]) == "unknown"


def test_lesson_lists_the_tool_as_the_sdk_does():
    _, requests = played("openai_agents", SIZES, Answer(text="Corby"))
    (lesson,) = example("openai_agents").lessons
    assert requests[0].body["tools"] == list(lesson.tools)


def test_settings_of_an_example_compose():
    pytest.importorskip("verl", reason="needs the extra [cpu]")
    script = (
        "import os, sys; from pathlib import Path; from agl_fast.quickstart.console import *;"
        "os.environ.update(ENVIRONMENT | CPU_ENVIRONMENT);"
        "from examples.multi_agent import EXAMPLE; from examples.running import settings;"
        "from agl_fast import VERL; from agl_fast.training.credit import load_hook;"
        "found = settings(EXAMPLE, Path('run'), model=None, steps=2, seed=1);"
        "ours = VERL(found).config.agentlightning;"
        "theirs = settings(EXAMPLE, Path('run'), model='some/model', steps=2, seed=1);"
        "print(load_hook(ours.rollout_hook).name, ours.trace_aggregator.level);"
        "print([each['actor_rollout_ref']['rollout']['max_model_len'] for each in (found, theirs)])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    *_, ours, lengths = ended.stdout.splitlines()
    assert ours == "examples.multi_agent:train_the_clerk trajectory"
    assert lengths == "[1024, 3072]"


@pytest.mark.parametrize(
    ("device", "message"),
    [("cuda", "expected MODEL=name-or-folder as well"), ("tpu", "expected cpu or cuda")],
)
def test_device_and_model_are_checked_before_anything_starts(device, message, monkeypatch, capsys):
    monkeypatch.setenv("DEVICE", device)
    monkeypatch.delenv("MODEL", raising=False)
    monkeypatch.setattr(sys, "argv", ["calculator"])
    with pytest.raises(SystemExit):
        running.main(calculator.EXAMPLE)
    assert f"DEVICE={device}: {message}" in capsys.readouterr().err


SOURCES = ("calculator", "sql", "multi_agent", "openai_agents")


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_SECONDS)
def test_all_examples_train_two_steps_and_leave_nothing(tmp_path):
    for module in ("verl", "vllm", "agents"):
        pytest.importorskip(module, reason="needs the extras [cpu] and [examples]")
    segments = leftovers.shared_memory_segments()
    script = SUPPORT.joinpath("all_examples.py")
    ended = subprocess.run(
        [sys.executable, str(script), "--steps", "2", "--runs", str(tmp_path), "--verbose"],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert processes_marked(f"AGL_FAST_TEST={tmp_path}") == []
    assert abandoned_segments(segments) == set()

    (metrics,) = tmp_path.glob("all_examples-*/metrics.jsonl")
    found = {line["step"]: line["data"] for line in lines(metrics)}
    assert list(found) == [0, 1, 2]
    for step in (1, 2):
        assert found[step]["training/n_rollouts"] == 8 * 8
        assert found[step]["training/tokens/trained"] > 0
        assert "actor/grad_norm" in found[step]
        assert found[step]["training/tokens/dropped/excluded"] > 0  # those that hooks leave out
        assert found[step]["training/audit/prob_diff_max"] < 1e-3
    for source in SOURCES:
        assert found[2][f"val/{source}/n_rollouts_w_trace"] == 2 * 4
