"""Daemons for tests, and agents that play Agent-lightning's runner with a script."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from support.fake_openai_server import Answer, FakeOpenAIServer, Request
from support.running_proxy import say

# Importing agentlightning would look for a price list on the internet.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # litellm's
    import agentlightning
    from agentlightning.adapter.triplet import LlmProxyTraceToTriplet, TracerTraceToTriplet
    from agentlightning.types import SpanCoreFields, TraceStatus, Triplet
    from agentlightning.utils.otlp import LightningStoreOTLPExporter

    from agl_fast.rollouts import (
        AgentModeDaemon,
        ValidatedRollout,
        store_access,
        validation_metrics,
    )
    from agl_fast.rollouts import progress as waiting
    from agl_fast.rollouts.mismatch_log import MismatchLog
    from agl_fast.verl.agentlightning_patches import patch_agentlightning
    from agl_fast.verl.supervision.loop_thread import LoopThread

# Tests take these from here, where their import makes no noise.
__all__ = [
    "AgentModeDaemon",
    "LightningStoreOTLPExporter",
    "LlmProxyTraceToTriplet",
    "LoopThread",
    "MismatchLog",
    "SpanCoreFields",
    "TraceStatus",
    "TracerTraceToTriplet",
    "Triplet",
    "ValidatedRollout",
    "agentlightning",
    "patch_agentlightning",
    "store_access",
    "validation_metrics",
    "waiting",
]

SECONDS = 20.0
# The fake server's ids of an answer of the assistant that says "hello": the next prompt repeats it.
HELLO = [ord(character) for character in "ahello\n"]


def hello(_: Request) -> Answer:
    return Answer(text="hello", token_ids=HELLO)


class Run:
    """One attempt at a rollout, from the agent's side."""

    def __init__(self, store: Any, rollout: Any, llm: Any, client: httpx.Client) -> None:
        self.store = store
        self.rollout = rollout
        self.input = rollout.input
        self.attempt_id = rollout.attempt.attempt_id
        self.llm = llm
        self.client = client

    def ask(self, *texts: str, headers: dict[str, str] | None = None, **body: Any) -> Any:
        """The server's answer to a conversation of user and assistant in turns."""
        url = self.llm.get_base_url(self.rollout.rollout_id, self.attempt_id) + "/chat/completions"
        request = {"model": self.llm.model, "messages": say(*texts), **body}
        return self.client.post(url, json=request, headers=headers).raise_for_status().json()

    def emit(self, reward: float) -> None:
        """Emit as a program without agl_fast does, which lets NaN and infinity pass."""
        emit_reward = inspect.unwrap(agentlightning.emit_reward)
        self.add_span(emit_reward(reward, propagate=False))

    def add_span(self, fields: Any) -> None:
        asyncio.run(self._add_span(fields))

    async def _add_span(self, fields: Any) -> None:
        ids = {"rollout_id": self.rollout.rollout_id, "attempt_id": self.attempt_id}
        sequence = await self.store.get_next_span_sequence_id(*ids.values())
        span = agentlightning.Span.from_core_fields(fields, sequence_id=sequence, **ids)
        await self.store.add_span(span)


Agent = Callable[[Run], float | None]


@contextmanager
def scripted_runners(store: Any, agent: Agent, n: int = 2) -> Iterator[None]:
    """Threads that run what is enqueued: an exception fails the rollout, as for agl's runner."""
    stop = threading.Event()
    threads = [
        threading.Thread(target=lambda: asyncio.run(_serve(store, agent, stop))) for _ in range(n)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(SECONDS)


async def _serve(store: Any, agent: Agent, stop: threading.Event) -> None:
    with httpx.Client(timeout=SECONDS) as client:
        while not stop.is_set():
            rollout = await store.dequeue_rollout()
            if rollout is None:
                await asyncio.sleep(0.005)
                continue
            resources = await store.get_resources_by_id(rollout.resources_id)
            run = Run(store, rollout, resources.resources["main_llm"], client)
            status = await asyncio.to_thread(_status, run, agent)
            await store.update_attempt(rollout.rollout_id, run.attempt_id, status=status)


def _status(run: Run, agent: Agent) -> str:
    try:
        reward = agent(run)
    except RuntimeError:
        return "failed"
    if reward is not None:
        run.emit(reward)
    return "succeeded"


def new_store() -> Any:
    return agentlightning.InMemoryLightningStore(thread_safe=True)


def new_daemon(store: Any, daemon_cls: type[AgentModeDaemon] = AgentModeDaemon, **changes: Any):
    settings = {
        "port": None,
        "train_rollout_n": 2,
        "train_information": {"model": "policy", "temperature": 1.0},
        "tokenizer": None,
        "mini_batch_size": 2,
        "pad_token_id": 0,
        "store": store,
        "trace_aggregator": {"level": "trajectory"},
        "rollout_deadline_seconds": SECONDS,
    }
    return daemon_cls(**{**settings, **changes})


class Bench:
    """A fake server, a store and a daemon."""

    def __init__(self, fake: FakeOpenAIServer, **changes: Any) -> None:
        self.fake = fake
        self.store = changes.pop("store", None) or new_store()
        self.daemon = new_daemon(self.store, **changes)

    def enqueue(self, n_samples: int = 2, *, is_train: bool = True, **columns: list[Any]) -> None:
        data = {"question": [f"q{i}" for i in range(n_samples)], **columns}
        self.daemon.set_up_data_and_server(data, [self.fake.address], is_train)

    def run(self, agent: Agent, n_samples: int = 2, *, runners: int = 2, **options: Any) -> None:
        """Enqueue, and run until everything has ended."""
        self.enqueue(n_samples, **options)
        with scripted_runners(self.store, agent, runners):
            self.daemon.run_until_all_finished(verbose=False)

    def rows(self) -> tuple[Any, dict[str, Any]]:
        return self.daemon.get_train_data_batch(64, 64, "cpu", 1)

    def train(self, agent: Agent, n_samples: int = 2, **options: Any) -> tuple[Any, dict[str, Any]]:
        self.run(agent, n_samples, **options)
        return self.rows()


@contextmanager
def daemon_bench(**changes: Any) -> Iterator[Bench]:
    with FakeOpenAIServer() as fake:
        fake.respond = hello
        bench = Bench(fake, **changes)
        try:
            yield bench
        finally:
            bench.daemon.stop()
