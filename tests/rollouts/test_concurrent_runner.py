"""Several rollouts of one process at the same time: their calls, rewards and ends stay apart."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from agl_fast import ConcurrentRunner, RolloutTracer
from agl_fast.runner import RolloutEndedError, concurrent
from agl_fast.verl.membership.identity import RunIdentity, set_current_run
from support.daemon_runs import SECONDS, agentlightning, daemon_bench, new_store
from support.fake_openai_server import Answer, Request
from support.running_proxy import say
from support.store_server import client_of, served

pytestmark = pytest.mark.filterwarnings(
    # Agent-lightning's client closes the connections of one event loop only.
    "ignore:.*unclosed",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


@contextmanager
def running(store: Any, agent: Any, **settings: Any) -> Iterator[ConcurrentRunner]:
    """One runner process, played by a thread, until the block ends."""
    event = threading.Event()
    settings = {"poll_interval": 0.02, "heartbeat_interval": 0.1, **settings}
    runner = ConcurrentRunner(**settings)
    failures: list[BaseException] = []

    def serve() -> None:
        runner.init(agent)
        runner.init_worker(3, store)
        try:
            asyncio.run(runner.iter(event=event))
        except BaseException as error:
            failures.append(error)
        finally:
            runner.teardown_worker(3)
            runner.teardown()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield runner
    finally:
        event.set()
        thread.join(SECONDS)
        assert not thread.is_alive()
        gc.collect()
    assert not failures


async def ask(llm: Any, *texts: str) -> Any:
    async with httpx.AsyncClient(timeout=SECONDS) as client:
        body = {"model": llm.model, "messages": say(*texts)}
        answer = await client.post(f"{llm.endpoint}/chat/completions", json=body)
        return answer.raise_for_status().json()


def answer_by_question(request: Request) -> Answer:
    """Ids that tell whose answer it is: 100 + the number in the first message."""
    number = int(request.body["messages"][0]["content"].removeprefix("q"))
    return Answer(text="hello", token_ids=[100 + number])


class Crowd:
    """Lets nobody pass before `n` have come."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.here = 0
        self.most = 0

    async def wait(self) -> None:
        self.here += 1
        self.most = max(self.most, self.here)
        end = time.monotonic() + SECONDS
        while self.most < self.n:
            assert time.monotonic() < end, f"{self.most} of {self.n} rollouts run at once"
            await asyncio.sleep(0.01)


def test_rollouts_of_one_process_stay_apart():
    """8 at once, over a store behind HTTP; each emits a reward between two calls."""
    crowd = Crowd(8)

    @agentlightning.rollout
    async def agent(task: dict, llm: agentlightning.LLM) -> float:
        number = int(task["question"].removeprefix("q"))
        await crowd.wait()
        await ask(llm, task["question"])
        await asyncio.sleep(0.01 * (number % 3))
        agentlightning.emit_reward(float(number))
        await ask(llm, task["question"], "hello", "and?")
        return number + 0.5

    with served(new_store()) as server, client_of(server) as store:
        settings = {"train_rollout_n": 1, "trace_aggregator": {"level": "transition"}}
        with daemon_bench(store=store, **settings) as bench:
            bench.fake.respond = answer_by_question
            bench.enqueue(8)
            with running(store, agent, rollouts_in_flight=8):
                bench.daemon.run_until_all_finished(verbose=False)
            rows, metrics = bench.rows()
    assert crowd.most == 8
    assert metrics["training/failed_rollouts"] == 0
    entries = bench.daemon.last_batch.rollouts
    assert [entry.reward for entry in entries] == [n + 0.5 for n in range(8)]
    assert [entry.call_rewards for entry in entries] == [(float(n), n + 0.5) for n in range(8)]
    sampled = [row[0] for row in rows.batch["responses"].tolist()]
    assert sampled == [100 + n for n in range(8) for _ in range(2)]


def test_no_connection_to_the_store_stays_open_but_the_runner_s_own():
    """That one is closed by Agent-lightning, on the loop of the runner."""

    @agentlightning.rollout
    async def agent(task: dict, llm: agentlightning.LLM) -> float:
        agentlightning.emit_reward(0.5)
        await asyncio.sleep(0.3)  # some heartbeats
        await ask(llm, task["question"])
        return 1.0

    with served(new_store()) as server, client_of(server) as store:
        with daemon_bench(store=store, train_rollout_n=1) as bench:
            bench.enqueue(2)
            with running(store, agent, heartbeat_interval=0.05):
                bench.daemon.run_until_all_finished(verbose=False)
            assert len(store._sessions) == 3  # the daemon and the proxy have one each, too
        assert len(store._sessions) == 1


def test_slots_have_worker_ids_and_heartbeats_of_their_own():
    crowd = Crowd(3)
    seen: list[Any] = []
    store = new_store()

    @agentlightning.rollout
    async def agent(task: dict, llm: agentlightning.LLM) -> float:
        await crowd.wait()
        await asyncio.sleep(0.3)
        seen.append(await store.query_workers())
        await ask(llm, "hi")
        return 1.0

    with daemon_bench(store=store, train_rollout_n=1) as bench:
        bench.enqueue(3)
        with running(store, agent, rollouts_in_flight=3):
            bench.daemon.run_until_all_finished(verbose=False)
        bench.rows()
    workers = {each.worker_id: each for each in seen[0]}
    names = [name for name in sorted(workers) if workers[name].current_rollout_id]
    assert [name.rpartition(".")[2] for name in names] == ["0", "1", "2"]
    assert len({workers[name].current_rollout_id for name in names}) == 3
    assert all(workers[name].last_heartbeat_time for name in names)


def test_one_failure_fails_one_rollout():
    @agentlightning.rollout
    async def agent(task: dict, llm: agentlightning.LLM) -> float:
        await ask(llm, "hi")
        if task["question"] == "q1":
            raise KeyError("of the agent")
        return 1.0

    store = new_store()
    with daemon_bench(store=store, train_rollout_n=1) as bench:
        bench.enqueue(4)
        with running(store, agent, rollouts_in_flight=2):
            bench.daemon.run_until_all_finished(verbose=False)
        rows, metrics = bench.rows()
    assert len(rows) == 3
    assert metrics["training/failed_rollouts/failed"] == 1


def test_a_rollout_past_its_deadline_is_cancelled_in_the_agent_too():
    cancelled = threading.Event()

    @agentlightning.rollout
    async def agent(task: dict, llm: agentlightning.LLM) -> float:
        await ask(llm, "hi")
        if task["question"] == "q0":
            try:
                await asyncio.sleep(SECONDS)
            except asyncio.CancelledError:
                cancelled.set()
                raise
        return 1.0

    store = new_store()
    with daemon_bench(store=store, train_rollout_n=1, rollout_deadline_seconds=1.0) as bench:
        bench.enqueue(2)
        with running(store, agent, rollouts_in_flight=1):
            # One slot: the second rollout runs only after the first has left it.
            bench.daemon.run_until_all_finished(verbose=False)
            _, metrics = bench.rows()
            assert cancelled.wait(SECONDS)
    assert metrics["training/failed_rollouts/deadline"] == 1
    assert metrics["training/n_rollouts"] == 1


def test_the_end_of_a_run_cancels_what_is_in_flight():
    begun = threading.Event()

    @agentlightning.rollout
    async def agent(task: dict, llm: agentlightning.LLM) -> float:
        begun.set()
        await asyncio.sleep(10 * SECONDS)
        return 1.0

    store = new_store()
    with daemon_bench(store=store, train_rollout_n=1) as bench:
        bench.enqueue(1)
        begin = time.monotonic()
        with running(store, agent):
            assert begun.wait(SECONDS)
        assert time.monotonic() - begin < SECONDS
        (rollout,) = asyncio.run(store.query_rollouts())
    assert rollout.attempt.status == "failed"


def test_max_rollouts():
    ran: list[str] = []

    @agentlightning.rollout
    async def agent(task: dict, llm: agentlightning.LLM) -> float:
        ran.append(task["question"])
        await asyncio.sleep(0.05)
        return 1.0

    store = new_store()
    with daemon_bench(store=store, train_rollout_n=1) as bench:
        bench.enqueue(5)
        runner = ConcurrentRunner(max_rollouts=3, rollouts_in_flight=2, poll_interval=0.02)
        runner.init(agent)
        runner.init_worker(0, store)
        asyncio.run(runner.iter())
        runner.teardown_worker(0)
    assert ran == ["q0", "q1", "q2"]


def test_rewards_emitted_in_threads():
    """`asyncio.to_thread` carries the rollout along; a bare thread has none and says so."""
    errors: list[RuntimeError] = []

    def emit_in_a_bare_thread() -> None:
        def emit() -> None:
            try:
                agentlightning.emit_reward(9.0)
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=emit)
        thread.start()
        thread.join()

    @agentlightning.rollout
    async def agent(task: dict, llm: agentlightning.LLM) -> None:
        await ask(llm, "hi")
        await asyncio.to_thread(emit_in_a_bare_thread)
        await asyncio.to_thread(agentlightning.emit_reward, 0.25)

    store = new_store()
    with daemon_bench(store=store, train_rollout_n=1) as bench:
        bench.enqueue(1)
        with running(store, agent):
            bench.daemon.run_until_all_finished(verbose=False)
        _, metrics = bench.rows()
    assert metrics["training/reward"] == 0.25
    assert "in the context of no rollout" in str(errors[0])


def test_operations_are_spans_of_their_rollout():
    @agentlightning.rollout
    async def agent(task: dict, llm: agentlightning.LLM) -> float:
        with agentlightning.operation(step=task["question"]):
            await ask(llm, "hi")
        return 1.0

    store = new_store()
    with daemon_bench(store=store, train_rollout_n=1) as bench:
        bench.enqueue(2)
        with running(store, agent):
            bench.daemon.run_until_all_finished(verbose=False)
        rollouts = asyncio.run(store.query_rollouts())
        for rollout in rollouts:
            spans = asyncio.run(store.query_spans(rollout.rollout_id))
            steps = [s.attributes["step"] for s in spans if "step" in s.attributes]
            assert steps == [rollout.input["question"]]


def test_an_agent_that_blocks_the_event_loop_is_named(caplog, monkeypatch):
    monkeypatch.setattr(concurrent, "BLOCKED_SECONDS", 0.1)

    @agentlightning.rollout
    async def agent(task: dict, llm: agentlightning.LLM) -> float:
        await ask(llm, "hi")
        time.sleep(0.6)
        return 1.0

    store = new_store()
    with daemon_bench(store=store, train_rollout_n=1) as bench:
        bench.enqueue(2)
        with running(store, agent):
            bench.daemon.run_until_all_finished(verbose=False)
    assert caplog.text.count("The agent blocked the event loop") == 1


@pytest.mark.parametrize("n", [0, -1])
def test_no_rollouts_in_flight(n):
    with pytest.raises(ValueError, match=f"rollouts_in_flight={n}: expected at least 1"):
        ConcurrentRunner(rollouts_in_flight=n)


def test_a_synchronous_agent_is_refused():
    @agentlightning.rollout
    def agent(task: dict, llm: agentlightning.LLM) -> float:
        return 1.0

    with pytest.raises(TypeError, match="expected `async def` rollout methods"):
        ConcurrentRunner().init(agent)


def test_another_tracer_is_replaced(caplog):
    runner = ConcurrentRunner(agentlightning.OtelTracer())
    assert isinstance(runner.tracer, RolloutTracer)
    assert "OtelTracer follows one rollout per process" in caplog.text
    assert ConcurrentRunner(own := RolloutTracer()).tracer is own


def test_a_store_that_does_not_answer_in_time_is_an_error_that_names_the_key():
    store = new_store()

    async def wait(*_: Any) -> int:
        await asyncio.sleep(30)
        return 1

    store.get_next_span_sequence_id = wait
    set_current_run(RunIdentity("run", "", False, store_answer_seconds=0.2))
    tracer = RolloutTracer()
    tracer.init_worker(0, store)

    async def emit() -> None:
        async with tracer.trace_context(rollout_id="r", attempt_id="a"):
            tracer.create_span("reward")

    limit = r"within 0\.2 s \(agentlightning\.deadlines\.store_answer_seconds\)"
    try:
        with pytest.raises(TimeoutError, match=rf"storing span 'reward' of rollout r .*{limit}"):
            asyncio.run(emit())
    finally:
        tracer.teardown_worker(0)
        set_current_run(None)


def test_a_trace_needs_both_ids():
    with pytest.raises(ValueError, match="rollout_id='r', attempt_id=None"):
        RolloutTracer().trace_context("name", rollout_id="r")


def test_a_foreign_cancellation_stays_one():
    """Only what the store ended becomes a failure of the rollout."""
    tracer = RolloutTracer()

    async def work(*, ended: bool) -> None:
        async with tracer.trace_context(rollout_id="r", attempt_id="a"):
            if ended:
                tracer.end("r", "a")
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(work(ended=False))
    with pytest.raises(RolloutEndedError, match="rollout r was cancelled"):
        asyncio.run(work(ended=True))


def test_the_trainer_takes_the_runner():
    trainer = agentlightning.Trainer(
        n_runners=2, runner=ConcurrentRunner(rollouts_in_flight=4), tracer=RolloutTracer()
    )
    assert trainer.runner.rollouts_in_flight == 4
    settings = {"type": "agl_fast.ConcurrentRunner", "rollouts_in_flight": 5}
    trainer = agentlightning.Trainer(n_runners=2, runner=settings, tracer=RolloutTracer())
    assert trainer.runner.rollouts_in_flight == 5
    assert trainer.runner.tracer is trainer.tracer
