"""Agents as users write them, run by Agent-lightning's own runners."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager

import openai
from aiohttp import web
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult

from support.daemon_runs import (
    HELLO,
    SECONDS,
    LightningStoreOTLPExporter,
    agentlightning,
    daemon_bench,
    patch_agentlightning,
)
from support.fake_openai_server import FakeOpenAIServer, prompt_ids_of
from support.running_proxy import say


class RunnerEvent(threading.Event):
    """An agentlightning.ExecutionEvent."""


@contextmanager
def lit_runner(store, agent):
    event = RunnerEvent()

    def work() -> None:
        runner = agentlightning.LitAgentRunner(
            tracer=agentlightning.OtelTracer(), poll_interval=0.02
        )
        runner.init(agent)
        runner.init_worker(0, store)
        try:
            asyncio.run(runner.iter(event=event))
        finally:
            runner.teardown_worker(0)
            runner.teardown()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        event.set()
        thread.join(SECONDS)


def converse(base_url: str, model: str, question: str) -> None:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        client.chat.completions.create(model=model, messages=say(question))
        agentlightning.emit_reward(0.25)
        client.chat.completions.create(model=model, messages=say(question, "hello", "and?"))


@agentlightning.rollout
def function_agent(task: dict, llm: agentlightning.LLM) -> float:
    converse(llm.endpoint, llm.model, task["question"])
    if task["question"] == "q1":
        raise RuntimeError("the agent crashed")
    return 1.0


class ClassAgent(agentlightning.LitAgent):
    def training_rollout(self, task, resources, rollout):
        llm = resources["main_llm"]
        base_url = llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id)
        converse(base_url, llm.model, task["question"])
        # No return value: the emitted reward counts.

    def validation_rollout(self, task, resources, rollout):
        self.training_rollout(task, resources, rollout)
        return 0.75


def test_function_agent():
    with daemon_bench(trace_aggregator={"level": "trajectory"}) as bench:
        bench.enqueue(2)
        with lit_runner(bench.store, function_agent):
            bench.daemon.run_until_all_finished()
        rows, metrics = bench.rows()
    assert rows.batch["prompts"].tolist() == [prompt_ids_of(say("q0"))] * 2
    assert rows.batch["response_mask"].sum(dim=1).tolist() == [2 * len(HELLO)] * 2
    assert rows.batch["token_level_scores"].sum(dim=1).tolist() == [1.0, 1.0]
    assert metrics["training/failed_rollouts/failed"] == 2
    assert metrics["training/proxy/recorded"] == 8


def test_class_agent_in_training_and_validation():
    agent = ClassAgent()
    with daemon_bench() as bench, lit_runner(bench.store, agent):
        bench.enqueue(1)
        bench.daemon.run_until_all_finished()
        rows, metrics = bench.rows()
        bench.enqueue(2, is_train=False)
        bench.daemon.run_until_all_finished()
        validation = bench.daemon.get_test_metrics()
    assert len(rows) == 2
    assert metrics["training/reward"] == 0.25
    assert validation["val/reward"] == 0.75
    assert validation["val/turn_count"] == 2


def test_spans_of_other_processes_go_to_the_store():
    patch_agentlightning()
    tracer = TracerProvider().get_tracer("test")
    span = tracer.start_span("reward")
    span.end()
    received = []

    class Store(FakeOpenAIServer):
        async def _handle(self, http):
            received.append((http.path, len(await http.read())))
            return web.Response()

    with Store() as store:
        exporter = LightningStoreOTLPExporter()
        exporter.enable_store_otlp(f"{store.url}/v1/traces", "ro-1", "at-1")
        assert exporter.export([span]) is SpanExportResult.SUCCESS
        exporter.shutdown()
    assert [path for path, _ in received] == ["/v1/traces"]
    assert received[0][1] > 0
