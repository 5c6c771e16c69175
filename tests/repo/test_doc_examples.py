"""Every Python example of the README and the pages is run, and its numbers are checked.

An example that only shows lines of a file is compared with the file. A new example needs a check:
`test_every_example_has_a_check` names those without.
"""

from __future__ import annotations

import asyncio
import os
import re
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from support.paths import ROOT

pytest.importorskip("agentlightning", reason="needs the extra [cpu] or [verl]")

# Without it litellm looks for a price list on the internet when it is imported, and waits.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import agl_fast
from agl_fast import Call, Rollout
from agl_fast.training.credit import STRATEGIES
from support.daemon_runs import agentlightning, hello
from support.fake_openai_server import Answer, FakeOpenAIServer

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl, vLLM and what they import

BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```", re.DOTALL | re.MULTILINE)


def examples(page: str) -> list[str]:
    folder = ROOT if page == "README" else ROOT / "docs"
    found = BLOCK.findall((folder / f"{page}.md").read_text())
    return [textwrap.dedent(text) for _, text in found]


PAGES = ["README", *sorted(page.stem for page in (ROOT / "docs").glob("*.md"))]
CHECKS: dict[tuple[str, int], Callable[..., None]] = {}


def checks(page: str, *indices: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def register(check: Callable[..., None]) -> Callable[..., None]:
        CHECKS.update({(page, index): check for index in indices})
        return check

    return register


def run(code: str, **names: Any) -> dict[str, Any]:
    exec(compile(code, "example", "exec"), names)
    return names


def without_last_statement(code: str, begins: str) -> str:
    head, found, _ = code.partition(f"\n{begins}")
    assert found
    return head


def is_in(code: str, *files: str) -> None:
    """Every line of the example, but comments and …, is in one of the files."""
    text = "\n".join((ROOT / file).read_text() for file in files)
    text = re.sub(r"^(\s*\w+): [^=\n]+ =", r"\1 =", text, flags=re.MULTILINE)
    lines = [line.partition("  #")[0].strip() for line in code.splitlines()]
    wanted = [line for line in lines if line and not line.startswith(("...", "#"))]
    assert wanted
    flat = re.sub(r"\s+", "", text)
    # The files have annotations.
    wanted = [re.sub(r"^((async )?def \w+\().*", r"\1", line) for line in wanted]
    assert [line for line in wanted if re.sub(r"\s+", "", line) not in flat] == []


@checks("README", 0)
@checks("concepts", 0)
def asserts_by_itself(code: str) -> None:
    assert "assert " in code
    run(code)


@checks("concepts", 1)
def builder(code: str) -> None:
    rollout = Rollout("r", "g", [Call([1, 2], [3]), Call([1, 2, 3, 7], [4]), Call([1], [5])], 1.0)
    names = run(code, agl_fast=agl_fast, rollout=rollout)
    batch = names["batch"]
    assert batch.tensors["response_mask"].tolist() == [[1, 0, 1], [1, 0, 0]]
    assert batch.columns["rollout_id_list"].tolist() == ["r", "r"]
    assert [(each.reward, each.n_rows) for each in batch.rollouts] == [(1.0, 2)]
    assert batch.accounting.sampled == batch.accounting.trained == 3
    assert [(each.call, each.index) for each in batch.mismatches] == [(2, 1)]
    assert batch.metrics["training/n_calls"] == 3


def reward_of(agent: Any, task: Any, text: str) -> float:
    """Of an `agl.rollout` agent whose model answers with the text."""
    with FakeOpenAIServer() as server:
        server.respond = lambda _: Answer(text=text)
        llm = agentlightning.LLM(endpoint=server.url, model="policy", sampling_parameters={})
        rollout = types.SimpleNamespace(rollout_id="r", attempt=None)
        found = agent.training_rollout_async(task, {"main_llm": llm}, rollout)
        return float(asyncio.run(found))


@checks("README", 1)
def whole_training_script(code: str) -> None:
    names = run(without_last_statement(code, "agl.Trainer("))
    task = {"question": "6 * 7?", "answer": "42"}
    assert reward_of(names["agent"], task, "It is 42.") == 1.0
    assert reward_of(names["agent"], task, "It is 41.") == 0.0
    assert composed(names["config"]).agentlightning.trace_aggregator.level == "trajectory"


def composed(config: dict[str, Any]) -> Any:
    from agl_fast.verl.config import compose

    return compose(config, device="cuda").config


def credited(hook: Any, credit: str, *rollouts: Rollout) -> list[tuple[float, ...] | None]:
    """Rewards of the calls in the batch, behind a hook and a credit strategy."""
    kept: list[Rollout] = []
    for rollout in rollouts:
        found = hook(rollout)
        kept += [] if found is None else found if isinstance(found, list) else [found]
    batch = agl_fast.build_batch(
        [STRATEGIES[credit](each) for each in kept],
        level="transition",
        max_prompt_length=8,
        max_response_length=64,
        pad_token_id=0,
    )
    return [each.call_rewards for each in batch.rollouts]


@checks("algorithm", 0)
def drops_single_calls(code: str) -> None:
    hook = run(code)["drop_single_calls"]
    one, two = Rollout("a", "g", [Call([1], [2])]), Rollout("b", "g", [Call([1], [2])] * 2)
    assert (hook(one), hook(two)) == (None, two)


@checks("algorithm", 1)
def one_rollout_an_agent(code: str) -> None:
    hook = run(code)["one_rollout_per_agent"]
    calls = [Call([1], [2], agent="planner"), Call([3], [4], agent="writer"), Call([5], [6])]
    given = Rollout("r", "g", calls, 0.5, status="succeeded", sample={"task": 1})
    found = hook(given)
    assert [(each.rollout_id, each.data_id) for each in found] == [
        ("r/planner", "g/planner"),
        ("r/writer", "g/writer"),
        ("r/main", "g/main"),
    ]
    assert [each.calls for each in found] == [[each] for each in calls]
    for each in found:
        assert (each.reward, each.status, each.sample) == (0.5, "succeeded", {"task": 1})


@checks("algorithm", 2)
def short_calls(code: str) -> None:
    from agl_fast.training.advantages import rewards_of_calls

    hook = run(code)["reward_short_calls"]
    short = Call([1], [2] * 10, finish_reason="stop")
    long = Call([1, 3], [2] * 50, finish_reason="length")
    aborted = Call([1, 4], [2] * 20, finish_reason="abort")
    again = [Call([1], [2] * 10, finish_reason="stop", response_id="x") for _ in range(2)]
    given = [
        Rollout("A", "g", [short, long, aborted], 1.0),
        Rollout("B", "g", [Call([1], [2] * 10, finish_reason="stop")], 1.0),
        Rollout("C", "g", again, 1.0),
        Rollout("D", "g", [Call([1], [2] * 10, finish_reason="stop")], None),
    ]
    kept = [STRATEGIES["per_call"](hook(each)) for each in given]
    batch = agl_fast.build_batch(
        kept, level="transition", max_prompt_length=8, max_response_length=64, pad_token_id=0
    )
    found = [rewards_of_calls(each, [0]) for each in batch.rollouts]
    assert [value for (value,) in found] == pytest.approx([0.9, 0.9, 0.9, 0.0])
    assert [each.n_rows for each in batch.rollouts] == [1, 1, 1, 1]
    assert [each.has_reward for each in batch.rollouts] == [True, True, True, False]


@checks("commands", 0)
def join_script(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Trainer:
        def __init__(self, **settings: Any) -> None:
            made.append(settings)

        def fit(self, agent: Any) -> None:
            made.append(agent)

    monkeypatch.setattr(agentlightning, "Trainer", Trainer)
    run(code, agent="the agent")
    assert made == [{"n_runners": 8}, "the agent"]


@checks("configuration", 0)
def composes(code: str) -> None:
    config = run(code, VERL=composed)["algorithm"]
    assert config.agentlightning.trace_aggregator.level == "trajectory"
    assert config.data.max_response_length == 2048


@checks("first_hour_on_a_gpu", 0, 1, 2, 3)
def settings_of_the_gpu_page(code: str) -> None:
    changed: dict[str, Any] = run(f"changed = {code.strip()}")["changed"]
    config = composed(merged(composable(), changed))
    for path, value in leaves(changed):
        assert OmegaConf.select(config, path) == value, path


def merged(base: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    found: Any = OmegaConf.to_container(OmegaConf.merge(base, changed))
    return dict(found)


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@checks("migration", 0)
def the_import_that_changes(code: str) -> None:
    _, after = code.split("# after")  # Agent-lightning's own fails on verl 0.9.1
    assert run(after)["VERL"] is agl_fast.VERL


@checks("performance", 0)
def many_rollouts_a_runner(code: str) -> None:
    made: list[dict[str, Any]] = []
    fake = types.SimpleNamespace(Trainer=lambda **settings: made.append(settings))
    run(code, agl=fake, agl_fast=agl_fast, VERL=lambda config: config, config="settings")
    (settings,) = made
    runner = settings["runner"]
    assert (settings["algorithm"], settings["n_runners"]) == ("settings", 8)
    assert settings["n_runners"] * runner.rollouts_in_flight == 256


@checks("quickstart", 0)
def agent_of_the_quickstart(code: str) -> None:
    is_in(code, "python/agl_fast/quickstart/agent.py")


@checks("quickstart", 1)
def run_of_the_quickstart(code: str) -> None:
    for name, file in (
        ("verl_settings", "settings"),
        ("samples", "boxes"),
        ("find_the_number", "agent"),
    ):
        assert name in code
        assert re.search(
            rf"^(async )?(def )?{name}\b",
            (ROOT / f"python/agl_fast/quickstart/{file}.py").read_text(),
            re.MULTILINE,
        )
    assert "agl.OtelTracer()" in (ROOT / "python/agl_fast/quickstart/training.py").read_text()


@checks("recording", 0)
def writes_and_reads(code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    given = Rollout("r", "g", [Call([1, 2], [3], [-0.5])], 1.0)
    (found,) = run(code, rollout=given)["rollouts"]
    assert (found.rollout_id, found.reward) == ("r", 1.0)
    assert list(found.calls[0].response_ids) == [3]


@checks("sql_agent", 0, 1)
def agent_of_the_sql_example(code: str) -> None:
    is_in(code, "examples/sql_agent.py")


@checks("sql_agent", 2)
def trains_the_writer(code: str) -> None:
    is_in(code, "examples/sql_agent.py")
    calls = [Call([1], [2], agent="writer"), Call([1], [2], agent="checker"), Call([1], [2])]
    found = run(code)["train_the_writer"](Rollout("r", "g", calls, 1.0))
    assert [call.trainable for call in found.calls] == [True, False, False]


@checks("sql_agent", 3)
def names_the_hook(code: str) -> None:
    settings: dict[str, Any] = {"agentlightning": {}}
    run(code, settings=settings)
    name = settings["agentlightning"]["rollout_hook"].partition(":")[2]
    assert f"def {name}(" in (ROOT / "examples/sql_agent.py").read_text()


@checks("sql_agent", 4)
def settings_of_the_sql_example(code: str) -> None:
    settings = code[code.index("SETTINGS = ") : code.index("\n\nif __name__")]
    config = composed(run(settings)["SETTINGS"])
    assert config.agentlightning.trace_aggregator.trajectory_max_response_length == 4096
    assert config.trainer.total_epochs == 4


@checks("verl", 0)
def imports_the_algorithm(code: str) -> None:
    assert run(without_last_statement(code, "algorithm = VERL"))["VERL"] is agl_fast.VERL


@checks("verl", 1)
def function_agent(code: str) -> None:
    agent = run(code)["agent"]
    task = {"question": "6 * 7?", "answer": "42"}
    assert (reward_of(agent, task, "42"), reward_of(agent, task, "41")) == (1.0, 0.0)


@checks("verl", 2)
def class_agent(code: str) -> None:
    agent = run(code)["Agent"]()
    asked: list[tuple[str, str]] = []
    llm = types.SimpleNamespace(get_base_url=lambda *ids: asked.append(ids))
    attempt = types.SimpleNamespace(attempt_id="a")
    agent.rollout({}, {"main_llm": llm}, types.SimpleNamespace(rollout_id="r", attempt=attempt))
    assert asked == [("r", "a")]


@checks("verl", 3)
def dry_run(code: str) -> None:
    function_agent_code = examples("verl")[1]
    agent = run(function_agent_code)["agent"]
    with FakeOpenAIServer() as server:
        server.respond = hello
        code = code.replace("http://localhost:8000/v1", server.url)
        names = run(code, agent=agent, tasks=[{"question": "a", "answer": "b"}] * 9)
    assert len(names["found"].batch) == 8 * 4


@checks("verl", 4)
def daemon_of_ones_own(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    daemon = run(without_last_statement(code, "algorithm = VERL"))["Daemon"]
    made = daemon.__new__(daemon)
    made.llm_timeout_seconds = 7.0
    assert (made.rollout_config().max_attempts, made.rollout_config().timeout_seconds) == (2, 7.0)
    made.rollout_finished(
        types.SimpleNamespace(rollout_id="r", status="succeeded", reward=0.5, calls=[1, 2])
    )
    assert capsys.readouterr().out == "r succeeded 0.5 2\n"


@checks("verl", 5, 6)
def settings_on_the_page(code: str) -> None:
    config: dict[str, Any] = {**composable()}
    run(code, config=config)
    found = composed(config).agentlightning
    for group, values in config["agentlightning"].items():
        assert {name: found[group][name] for name in values} == values


def composable() -> dict[str, Any]:
    names = run(examples("configuration")[0], VERL=dict)
    settings = dict(names["algorithm"])
    # As long as the rows of every page.
    settings["actor_rollout_ref"]["actor"]["ppo_max_token_len_per_gpu"] = 65536
    return settings


def test_every_example_has_a_check() -> None:
    there = {(page, index) for page in PAGES for index in range(len(examples(page)))}
    assert there == set(CHECKS)


@pytest.mark.parametrize(("page", "index"), CHECKS, ids=lambda value: str(value))
def test_example(page: str, index: int, request: pytest.FixtureRequest) -> None:
    check = CHECKS[page, index]
    wanted = list(check.__annotations__)
    fixtures = {
        name: request.getfixturevalue(name) for name in wanted if name not in ("code", "return")
    }
    check(examples(page)[index], **fixtures)
