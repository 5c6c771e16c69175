"""One process of a run is killed in one phase: what is left, and whether the next run ends."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("verl") is None:
    pytest.skip("needs the extra [cpu]", allow_module_level=True)

from support.fake_openai_server import Answer, FakeOpenAIServer, Request
from support.process_runs import (
    PHASES,
    SECONDS,
    Options,
    Program,
    drive,
    free_port,
    is_free,
    join,
    serve_store,
)

# The others go into `make test-all`: what a killed driver leaves differs little between phases.
QUICK = ("sampling", "update")
QUICK_OR_SLOW = [
    pytest.param(phase, marks=[] if phase in QUICK else [pytest.mark.slow]) for phase in PHASES
]

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # of Agent-lightning and what it imports
]
GONE_SECONDS = 15.0


def hello(_: Request) -> Answer:
    return Answer()


class Bench:
    """A fake vLLM, a port, and the programs that a test starts."""

    def __init__(self, folder: Path, fake: FakeOpenAIServer) -> None:
        self.folder = folder
        self.fake = fake
        self.port = free_port()
        self.programs: list[Program] = []
        self.store_port = 0

    def options(self, label: str, **changes: Any) -> Options:
        return Options(label, self.folder, self.port, self.fake.address, **changes)

    def run(self, label: str, **changes: Any) -> Program:
        return self.start(f"run-{label}", drive, self.options(label, **changes))

    def join(self, label: str, *arguments: str, **changes: Any) -> Program:
        return self.start(f"join-{label}", join, self.options(label, **changes), list(arguments))

    def serve_store(self) -> tuple[int, Program]:
        """A store in a process of its own, on one port as often as one likes."""
        self.store_port = self.store_port or free_port()
        served = self.start("store", serve_store, self.store_port)
        until(lambda: not is_free(self.store_port), SECONDS)
        return self.store_port, served

    def start(self, name: str, main: Callable[..., Any], *arguments: Any) -> Program:
        program = Program(self.folder, name, main, *arguments)
        self.programs.append(program)
        return program

    def asked(self) -> list[str]:
        """The agents' messages, in the order in which they arrived."""
        return [body["messages"][-1]["content"] for body in self.fake.bodies()]

    def labels(self) -> set[str]:
        return {message.split()[0] for message in self.asked()}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with FakeOpenAIServer() as fake:
        fake.respond = hello
        bench = Bench(tmp_path, fake)
        try:
            yield bench
        finally:
            for program in bench.programs:
                program.kill()


def held(text: str, seconds: float = 120.0) -> Callable[[Request], Answer]:
    """Messages with this text get their answer late."""
    return lambda request: Answer(
        delay=seconds if text in str(request.body.get("messages")) else 0.0
    )


def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def stopped_in(bench: Bench, phase: str, label: str = "old", **changes: Any) -> Program:
    """A run that stands in this phase of step 1."""
    if phase == "sampling":
        bench.fake.respond = held("step 1 task")
    run = bench.run(label, hold=phase, **changes)
    run.wait_for(f"{phase} 1")
    if phase == "sampling":
        until(lambda: any("step 1 task" in message for message in bench.asked()))
    return run


def assert_the_next_run_resumes_and_ends(bench: Bench, first_step: int, **changes: Any) -> None:
    bench.fake.respond = hello
    before = len(bench.asked())
    following = bench.run("new", **changes)
    assert following.ended() == 0, following.output
    assert f"sampling {first_step}\n" in following.output
    assert f"sampling {first_step - 1}\n" not in following.output
    assert "4 rows of step 2" in following.output
    messages = bench.asked()[before:]
    assert {message.split()[0] for message in messages} == {"new"}
    assert len(messages) == 4 * (3 - first_step)
    assert following.is_gone(GONE_SECONDS)


@pytest.mark.parametrize("phase", QUICK_OR_SLOW)
def test_a_killed_driver_takes_its_runners_with_it(bench: Bench, phase: str) -> None:
    run = stopped_in(bench, phase)
    assert len(run.runners()) >= 2
    os.kill(run.pid, signal.SIGKILL)
    assert run.is_gone(GONE_SECONDS), run.session()
    until(lambda: is_free(bench.port), 5.0)  # its threads end after its first one
    assert_the_next_run_resumes_and_ends(bench, 1)


@pytest.mark.parametrize("phase", QUICK_OR_SLOW)
def test_a_killed_store_ends_the_run_with_the_cause(bench: Bench, phase: str) -> None:
    """The run sees it when it asks the store next."""
    port, store = bench.serve_store()
    run = stopped_in(bench, phase, store=port)
    store.kill()
    (bench.folder / "go").touch()
    assert run.ended() == 1, run.output
    last = run.output.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: the store failed to")
    assert f"127.0.0.1:{port}" in last
    assert run.is_gone(GONE_SECONDS), run.session()
    assert is_free(port)
    bench.serve_store()
    first_step = 1 if phase == "sampling" else 2
    assert_the_next_run_resumes_and_ends(bench, first_step, store=port)


def test_what_a_killed_driver_has_left_in_a_store_is_not_run(bench: Bench) -> None:
    port, _ = bench.serve_store()
    proxy_port = free_port()
    run = stopped_in(bench, "sampling", store=port, proxy_port=proxy_port)
    os.kill(run.pid, signal.SIGKILL)
    assert run.is_gone(GONE_SECONDS), run.session()
    assert_the_next_run_resumes_and_ends(bench, 1, store=port, proxy_port=proxy_port)
    assert "404" not in bench.programs[-1].output


@pytest.mark.parametrize("phase", QUICK_OR_SLOW)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_and_its_runners(
    bench: Bench, phase: str, number: signal.Signals, status: int
) -> None:
    run = stopped_in(bench, phase)
    os.kill(run.pid, number)
    assert run.ended() == status, run.output
    assert run.is_gone(GONE_SECONDS), run.session()
    assert "Algorithm bundle" not in run.output  # Agent-lightning's tracebacks
    assert is_free(bench.port)


def test_a_killed_runner_s_rollout_fails_and_the_run_ends(bench: Bench) -> None:
    bench.fake.respond = held("step 1 task", 5.0)
    run = bench.run("old")
    run.wait_for("sampling 1")
    until(lambda: sum("step 1 task" in message for message in bench.asked()) == 2)
    killed = run.runners()[-1]
    killed.kill()
    assert run.ended() == 1  # as Agent-lightning reports a runner that was killed
    assert "3 rows of step 1" in run.output
    assert "4 rows of step 2" in run.output
    (line,) = [line for line in run.output.splitlines() if "no heartbeat for 3 s" in line]
    assert f".{killed.pid}-" in line  # the worker's name says which process it was
    assert run.is_gone(GONE_SECONDS)


def test_a_second_run_on_the_port_starts_no_runner(bench: Bench) -> None:
    """Its runners would have worked for the first run."""
    run = stopped_in(bench, "update")
    second = bench.run("second")
    assert second.ended() == 1
    assert f"the store's port {bench.port}: expected a free port on 127.0.0.1" in second.output
    assert f"process {run.pid} of" in second.output
    assert "agentlightning.Trainer(port=" in second.output
    assert bench.labels() == {"old"}
    assert run.process.is_alive()


def test_a_join_that_waits_for_a_store_serves_no_run_with_runners_of_its_own(bench: Bench) -> None:
    joined = bench.join("foreign")
    joined.wait_for("the agents wait for it")
    run = bench.run("own")
    assert joined.ended() == 1
    assert "has runners of its own and takes no others" in joined.output
    assert run.ended() == 0, run.output
    assert bench.labels() == {"own"}
    assert joined.is_gone(GONE_SECONDS)


def test_a_join_serves_the_run_that_it_names_and_no_second_one(bench: Bench) -> None:
    joined = bench.join("joined", "--wait=30", n_runners=1)
    first = bench.run("first", role="algorithm")
    joined.wait_for(f"process {first.pid} of")
    assert first.ended() == 0, first.output
    assert bench.labels() == {"joined"}
    (bench.folder / "saved").unlink()
    second = bench.run("second", role="algorithm", daemon={"first_runner_seconds": 8.0})
    assert joined.ended() == 0
    assert f"is now that of run {run_id_in(joined.output, second.pid)}" in joined.output
    assert second.ended() == 1  # nobody has joined it
    assert "no runner has asked for work in 8 s; 4 rollouts" in second.output
    assert len(bench.asked()) == 12


def run_id_in(output: str, pid: int) -> str:
    found = re.search(rf"run (\w+) \([^()]*process {pid} of", output)
    assert found, output
    return found[1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_join_takes_its_runners_with_it(bench: Bench, number: signal.Signals) -> None:
    bench.fake.respond = held("step 1 task", 4.0)
    run = bench.run("run", role="algorithm")
    joined = bench.join("joined")
    run.wait_for("sampling 1")
    until(lambda: any("step 1 task" in message for message in bench.asked()))
    os.kill(joined.pid, number)
    assert joined.is_gone(GONE_SECONDS), joined.session()
    bench.fake.respond = hello
    following = bench.join("following")
    assert run.ended() == 0, run.output
    assert "4 rows of step 2" in run.output
    assert bench.labels() == {"joined", "following"}
    following.kill()
