"""Runners that die, and stores that restart, while rollouts run."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from agl_fast.rollouts.runners import RunnerWatch
from support.daemon_runs import (
    HELLO,
    SECONDS,
    AgentModeDaemon,
    agentlightning,
    daemon_bench,
    new_store,
    scripted_runners,
)
from support.fake_openai_server import prompt_ids_of
from support.paths import SUPPORT
from support.running_proxy import say
from support.store_server import client_of, served

KILLED_RUNNER = SUPPORT.joinpath("killed_runner.py")
SILENT_SECONDS = 1.5


class Retrying(AgentModeDaemon):
    def rollout_config(self) -> agentlightning.RolloutConfig:
        return agentlightning.RolloutConfig(max_attempts=2, retry_condition=["unresponsive"])


def succeeds(run) -> float:
    run.ask("new")
    return 1.0


def test_a_killed_runner_s_rollout_is_tried_again():
    """A process of its own, killed between two calls; the store, too, is behind HTTP."""
    store = new_store()
    settings = {"train_rollout_n": 1, "runner_silent_seconds": SILENT_SECONDS}
    with (
        served(store) as server,
        daemon_bench(store=store, daemon_cls=Retrying, **settings) as bench,
    ):
        bench.enqueue(1)
        runner = subprocess.Popen([sys.executable, str(KILLED_RUNNER), server.url])
        try:
            assert runner.wait(60) == -signal.SIGKILL
        finally:
            runner.kill()
            runner.wait()
        with scripted_runners(store, succeeds):
            bench.daemon.run_until_all_finished(verbose=False)
        rows, metrics = bench.rows()
    assert rows.batch["prompts"].tolist() == [prompt_ids_of(say("new"))]
    assert metrics["training/failed_rollouts"] == 0
    assert metrics["training/discarded_attempts"] == 1
    assert metrics["training/proxy/discarded"] == 1
    assert metrics["training/proxy/discarded_tokens"] == len(HELLO)


def test_a_silent_runner_s_rollout_fails_soon(caplog):
    store = new_store()

    def take_and_die(name: str) -> None:
        """What a runner does that takes a rollout, beats once and is gone."""
        asyncio.run(store.dequeue_rollout(worker_id=name))
        asyncio.run(store.update_worker(name, {}))

    settings = {"train_rollout_n": 1, "runner_silent_seconds": 0.3}
    with daemon_bench(store=store, rollout_deadline_seconds=2.0, **settings) as bench:
        bench.enqueue(2)
        take_and_die("worker-1")
        with scripted_runners(store, succeeds, 1):
            bench.daemon.run_until_all_finished(verbose=False)
        rows, metrics = bench.rows()
    assert len(rows) == 1
    assert metrics["training/failed_rollouts/unresponsive"] == 1
    assert metrics["training/skipped_rollouts/failed"] == 1
    assert "worker-1 has sent no heartbeat for 0.3 s" in caplog.text


def test_no_runner_is_left():
    store = new_store()
    settings = {"train_rollout_n": 1, "runner_silent_seconds": 0.3}
    with daemon_bench(store=store, rollout_deadline_seconds=4.0, **settings) as bench:
        bench.enqueue(2)
        asyncio.run(store.dequeue_rollout(worker_id="worker-1"))
        asyncio.run(store.update_worker("worker-1", {}))
        with pytest.raises(TimeoutError, match="no runner is left for 1 queued rollouts"):
            bench.daemon.run_until_all_finished(verbose=False)


def test_a_runner_that_beats_while_its_agent_works_is_left_alone():
    store = new_store()

    def slow(run) -> float:
        run.ask("a")
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            asyncio.run(store.update_worker("worker-1", {}))
            time.sleep(0.05)
        return 1.0

    settings = {"train_rollout_n": 1, "runner_silent_seconds": 0.4}
    with daemon_bench(store=store, rollout_deadline_seconds=4.0, **settings) as bench:
        dequeue = store.dequeue_rollout
        store.dequeue_rollout = lambda: dequeue(worker_id="worker-1")
        _, metrics = bench.train(slow, 1, runners=1)
    assert metrics["training/failed_rollouts"] == 0


def test_a_runner_without_beats_whose_agent_calls_is_left_alone():
    store = new_store()

    def busy(run) -> float:
        asyncio.run(store.update_worker("worker-1", {}))
        for turn in range(8):
            run.ask(f"turn {turn}")
            time.sleep(0.2)
        return 1.0

    settings = {"train_rollout_n": 1, "runner_silent_seconds": 0.6}
    with daemon_bench(store=store, rollout_deadline_seconds=6.0, **settings) as bench:
        dequeue = store.dequeue_rollout
        store.dequeue_rollout = lambda: dequeue(worker_id="worker-1")
        _, metrics = bench.train(busy, 1, runners=1)
    assert metrics["training/failed_rollouts"] == 0
    assert metrics["training/n_triplets"] == 8


def worker(name: str, beat: float | None, attempt: str = "", status: str = "busy") -> Any:
    return SimpleNamespace(
        worker_id=name, last_heartbeat_time=beat, current_attempt_id=attempt, status=status
    )


def attempt_of(name: str | None, attempt_id: str) -> Any:
    return SimpleNamespace(worker_id=name, attempt_id=attempt_id)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [0.0]
    monkeypatch.setattr("agl_fast.rollouts.runners.time.monotonic", lambda: clock[0])
    return clock


def test_who_is_silent(now):
    runners = RunnerWatch(10.0)
    a, b, never = attempt_of("a", "1"), attempt_of("b", "2"), attempt_of("never beats", "3")

    def silent(beat_of_a: float, beat_of_b: float) -> list[Any]:
        workers = [worker("a", beat_of_a, "1"), worker("b", beat_of_b, "2")]
        runners.look([*workers, worker("never beats", None, "3")])
        return [each for each in (a, b, never) if runners.abandoned_because(each) is not None]

    assert silent(1.0, 1.0) == []
    now[0] = 11.0
    assert silent(1.0, 2.0) == [a]
    now[0] = 22.0
    assert silent(1.0, 2.0) == [a, b]
    assert not runners.are_all_silent
    runners.look([worker("a", 1.0, "1"), worker("b", 2.0, "2")])
    assert runners.are_all_silent
    assert silent(1.0, 3.0) == [a]  # it is back
    undecided = RunnerWatch(None)
    undecided.look([worker("a", 1.0, "1")])
    now[0] = 99.0
    undecided.look([worker("a", 1.0, "1")])
    assert undecided.abandoned_because(a) is None


@pytest.mark.parametrize(
    "elsewhere", [worker("a", 1.0, "2"), worker("a", 1.0, "1", status="idle"), worker("a", 1.0)]
)
def test_a_namesake_does_not_cover_for_a_dead_runner(now, elsewhere):
    """Its beats come, and it works on something else, or on nothing."""
    runners = RunnerWatch(10.0)
    left = attempt_of("a", "1")
    runners.look([worker("a", 0.0, "1")])
    assert runners.abandoned_because(left) is None
    for now[0] in (5.0, 10.0, 15.0):
        elsewhere.last_heartbeat_time = now[0]
        runners.look([elsewhere])
        assert runners.abandoned_because(left) is None
    now[0] = elsewhere.last_heartbeat_time = 15.1
    runners.look([elsewhere])
    assert "idle or in another rollout for 10 s" in runners.abandoned_because(left)
    assert runners.abandoned_because(attempt_of(None, "1")) is None
    runners.look([worker("a", 16.0, "1")])  # it had been slow to say so
    assert runners.abandoned_because(left) is None


@pytest.mark.parametrize("namesake_works", [False, True])
def test_an_attempt_whose_runner_had_a_namesake_is_given_up(caplog, namesake_works):
    store = new_store()
    settings = {"train_rollout_n": 1, "runner_silent_seconds": 0.4}
    with daemon_bench(store=store, rollout_deadline_seconds=8.0, **settings) as bench:
        bench.enqueue(2)
        asyncio.run(store.dequeue_rollout(worker_id="Worker-0"))  # by a process that dies

        def works(run) -> float:
            end = time.monotonic() + (1.0 if namesake_works else 0.0)
            while True:
                asyncio.run(store.update_worker("Worker-0", {}))
                run.ask("a")
                if time.monotonic() > end:
                    return 1.0
                time.sleep(0.1)

        dequeue = store.dequeue_rollout

        async def by_namesake() -> Any:
            await store.update_worker("Worker-0", {})
            return await dequeue(worker_id="Worker-0")

        store.dequeue_rollout = by_namesake
        with scripted_runners(store, works, 1):
            bench.daemon.run_until_all_finished(verbose=False)
        _, metrics = bench.rows()
    assert metrics["training/failed_rollouts/unresponsive"] == 1
    assert metrics["training/failed_rollouts"] == 1
    assert "Worker-0 has been idle or in another rollout" in caplog.text


def test_no_runner_ever():
    settings = {"train_rollout_n": 1, "first_runner_seconds": 0.3}
    with daemon_bench(rollout_deadline_seconds=600.0, **settings) as bench:
        bench.enqueue(2)
        with pytest.raises(TimeoutError, match="no runner has asked for work in"):
            bench.daemon.run_until_all_finished(verbose=False)


def test_only_the_first_runner_is_waited_for_so_shortly():
    settings = {"train_rollout_n": 1, "first_runner_seconds": SECONDS}
    with daemon_bench(rollout_deadline_seconds=1.0, **settings) as bench:
        bench.train(succeeds, 1)
        bench.daemon._first_runner.seconds = 0.1
        bench.enqueue(1)
        with pytest.raises(TimeoutError, match="no runner took any of 1 queued"):
            bench.daemon.run_until_all_finished(verbose=False)


def test_a_store_that_does_not_know_its_runners():
    store = new_store()

    async def unknown(**_):
        raise NotImplementedError

    with daemon_bench(store=store, train_rollout_n=1, rollout_deadline_seconds=1.0) as bench:
        store.query_workers = unknown
        bench.enqueue(1)
        with pytest.raises(TimeoutError, match="no runner took any"):
            bench.daemon.run_until_all_finished(verbose=False)


def test_an_agent_process_that_dies_between_two_calls_fails_its_rollout():
    """The runner lives, and sees its agent's process end."""
    script = (
        "import httpx, os, signal, sys; url, model = sys.argv[1:]; "
        "body = {'model': model, 'messages': [{'role': 'user', 'content': 'a'}]}; "
        "httpx.post(url + '/chat/completions', json=body).raise_for_status(); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )

    def agent(run) -> float:
        if run.input["question"] == "q1":
            url = run.llm.get_base_url(run.rollout.rollout_id, run.attempt_id)
            ended = subprocess.run([sys.executable, "-c", script, url, run.llm.model], check=False)
            raise RuntimeError(f"the agent ended with {ended.returncode}")
        run.ask("a")
        return 1.0

    with daemon_bench(train_rollout_n=1) as bench:
        rows, metrics = bench.train(agent, 2)
    assert len(rows) == 1
    assert metrics["training/failed_rollouts/failed"] == 1
    assert metrics["training/skipped_tokens/failed"] == len(HELLO)


# Agent-lightning's client closes its connections of the event loop that closes it, no others.
@pytest.mark.filterwarnings("ignore:.*unclosed", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_store_that_restarts_loses_nothing():
    """The daemon and the runners are clients of one that is away for a while."""
    away = threading.Event()

    def agent(run) -> float:
        run.ask(run.input["question"])
        if run.input["question"] == "q1":
            away.set()
            assert back.wait(SECONDS)
        run.ask(run.input["question"], "hello", "and?")
        return 1.0

    back = threading.Event()
    with served(new_store()) as server, client_of(server) as store:

        def restart() -> None:
            assert away.wait(SECONDS)
            server.stop()
            time.sleep(0.5)
            server.start()
            back.set()

        with daemon_bench(store=store, train_rollout_n=1) as bench:
            thread = threading.Thread(target=restart)
            thread.start()
            rows, metrics = bench.train(agent, 3, runners=1)
            thread.join()
    assert len(rows) == 3
    assert metrics["training/failed_rollouts"] == 0
    assert metrics["training/proxy/recorded"] == 6
    gc.collect()


def test_answers_that_come_too_late_are_counted():
    """An older attempt's while the new one runs, and anyone's after the rollout has ended."""
    store = new_store()
    urls = []

    def retried(run) -> float:
        urls.append(run.llm.get_base_url(run.rollout.rollout_id, run.attempt_id))
        older, run.attempt_id = run.attempt_id, "none"
        attempted = asyncio.run(store.start_attempt(run.rollout.rollout_id))
        run.attempt_id = attempted.attempt.attempt_id
        run.ask("new")
        newer, run.attempt_id = run.attempt_id, older
        run.ask("late")
        run.emit(0.25)
        run.attempt_id = newer
        return 0.5

    with daemon_bench(store=store, train_rollout_n=1) as bench:
        bench.run(retried, 1)
        body = {"model": "policy", "messages": say("later still")}
        with httpx.Client(timeout=SECONDS) as client:
            client.post(f"{urls[0]}/chat/completions", json=body).raise_for_status()
            rows, metrics = bench.rows()
            refused = client.post(f"{urls[0]}/chat/completions", json=body)
            assert refused.status_code == 404
        bench.enqueue(1)
        with scripted_runners(store, succeeds):
            bench.daemon.run_until_all_finished(verbose=False)
        _, following = bench.rows()
    assert rows.batch["prompts"].tolist() == [prompt_ids_of(say("new"))]
    assert metrics["training/reward"] == 0.5
    assert metrics["training/proxy/discarded"] == 1
    assert metrics["training/proxy/discarded_tokens"] == len(HELLO)
    assert metrics["training/proxy/late"] == 1
    assert metrics["training/proxy/late_tokens"] == len(HELLO)
    assert following["training/proxy/late_tokens"] == 0
    assert following["training/n_triplets"] == 1
