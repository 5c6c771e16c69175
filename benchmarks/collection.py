"""Trained rollouts a second by collection mode: `python -m benchmarks.collection`.

Fake servers share a token rate among their requests and queue what exceeds their slots. Agents make
2 to 20 calls with log-normal tool times between them (p99 is 30 times the median). An update takes
half of the time that the servers need for a step's tokens if they never idle. The proxy, the store,
the daemon and the batches are the real ones; servers have a process of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import multiprocessing
import os
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
from aiohttp import web

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

SIGMA = math.log(30) / 2.326  # of a log-normal distribution whose p99 is 30 times its median
TICK_SECONDS = 0.02
PROMPT_TOKENS = 40


@dataclass(frozen=True)
class Load:
    """What agents, servers and trainer do.

    Attributes:
        n_groups, n_rollouts: per step: samples, and rollouts of each.
        n_servers: fake servers.
        ideal_seconds: sampling a step's tokens if no server idles.
        tool_seconds: median time between two calls.
        stream_rate: tokens a second of one request, at most.
        mean_tokens: of an answer.
    """

    n_groups: int = 64
    n_rollouts: int = 8
    n_servers: int = 2
    ideal_seconds: float = 20.0
    tool_seconds: float = 0.4
    stream_rate: float = 60.0
    mean_tokens: int = 50

    @property
    def update_seconds(self) -> float:
        return self.ideal_seconds / 2

    @property
    def tokens_per_step(self) -> float:
        return self.n_groups * self.n_rollouts * 11 * self.mean_tokens

    @property
    def server_rate(self) -> float:
        """Tokens a second of a server."""
        return self.tokens_per_step / self.ideal_seconds / self.n_servers


@dataclass(eq=False)
class Request:
    left: float
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Server:
    """Shares its token rate equally among its requests."""

    def __init__(self, rate: float, stream_rate: float) -> None:
        self._rate, self._stream_rate = rate, stream_rate
        self._requests: set[Request] = set()
        self._n_answers = 0
        self.busy_seconds = 0.0
        self.sampled = 0

    async def serve(self) -> int:
        app = web.Application(client_max_size=0)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
        self._sampling = asyncio.ensure_future(self._sample())
        return int(runner.addresses[0][1])

    async def _sample(self) -> None:
        then = time.perf_counter()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.perf_counter()
            elapsed, then = now - then, now
            if not self._requests:
                continue
            share = min(self._stream_rate, self._rate / len(self._requests)) * elapsed
            self.busy_seconds += elapsed * min(
                1.0, len(self._requests) * self._stream_rate / self._rate
            )
            for request in list(self._requests):
                request.left -= share
                if request.left <= 0:
                    self._requests.discard(request)
                    request.done.set()

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        if http.path == "/health":
            return web.Response()
        if http.path == "/busy":
            return web.json_response({"busy": self.busy_seconds, "sampled": self.sampled})
        body = await http.json()
        n_tokens = int(body["max_tokens"])
        request = Request(n_tokens)
        self._requests.add(request)
        try:
            await request.done.wait()
        finally:
            self._requests.discard(request)
        self.sampled += n_tokens
        self._n_answers += 1
        n_prompt = PROMPT_TOKENS + len(body["messages"])
        return web.Response(
            body=answer(f"{id(self)}-{self._n_answers}", n_prompt, n_tokens),
            content_type="application/json",
        )


def answer(name: str, n_prompt: int, n_tokens: int) -> bytes:
    content = [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}] * n_tokens
    return json.dumps(
        {
            "id": name,
            "object": "chat.completion",
            "created": 0,
            "model": "policy",
            "prompt_token_ids": [7] * n_prompt,
            "usage": {"prompt_tokens": n_prompt, "completion_tokens": n_tokens},
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "a"},
                    "finish_reason": "stop",
                    "token_ids": [11] * n_tokens,
                    "logprobs": {"content": content},
                }
            ],
        }
    ).encode()


def run_servers(load: Load, ports: Connection) -> None:
    async def run() -> None:
        servers = [Server(load.server_rate, load.stream_rate) for _ in range(load.n_servers)]
        ports.send([await each.serve() for each in servers])
        await asyncio.Event().wait()

    asyncio.run(run())


class Agents:
    """Runs what is enqueued in the store, on a thread."""

    def __init__(self, store: Any, load: Load, n_at_once: int) -> None:
        self._store, self._load, self._n_at_once = store, load, n_at_once
        self._n_of_sample: Counter[int] = Counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.statuses: Counter[int] = Counter()

    def __enter__(self) -> Agents:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        running: set[asyncio.Task[None]] = set()
        async with aiohttp.ClientSession(connector=connector) as client:
            while not self._stop.is_set():
                rollout = None
                if len(running) < self._n_at_once:
                    rollout = await self._store.dequeue_rollout()
                if rollout is None:
                    await asyncio.sleep(0.01)
                    continue
                task = asyncio.ensure_future(self._roll_out(client, rollout))
                running.add(task)
                task.add_done_callback(running.discard)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _roll_out(self, client: aiohttp.ClientSession, rollout: Any) -> None:
        number = rollout.input["number"]
        draw = random.Random(f"{number} {self._n_of_sample[number]}")
        self._n_of_sample[number] += 1
        resources = await self._store.get_resources_by_id(rollout.resources_id)
        llm = resources.resources["main_llm"]
        attempt_id = rollout.attempt.attempt_id
        url = llm.get_base_url(rollout.rollout_id, attempt_id) + "/chat/completions"
        messages: list[dict[str, str]] = []
        status = "succeeded"
        for _ in range(draw.randint(2, 20)):
            n_tokens = max(1, round(draw.expovariate(1 / self._load.mean_tokens)))
            messages.append({"role": "user", "content": "x"})
            body = {"model": llm.model, "messages": messages, "max_tokens": n_tokens}
            async with client.post(url, json=body) as reply:
                self.statuses[reply.status] += 1
                if reply.status != 200:
                    status = "failed"
                    break
                await reply.read()
            messages.append({"role": "assistant", "content": "a"})
            await asyncio.sleep(self._load.tool_seconds * draw.lognormvariate(0, SIGMA))
        with contextlib.suppress(Exception):  # the run has ended
            await self._store.update_attempt(rollout.rollout_id, attempt_id, status=status)


class Samples:
    """Numbers, without end."""

    def __init__(self) -> None:
        self._next = 0

    def draw(self) -> dict[str, Any]:
        self._next += 1
        return {"number": self._next - 1}


@dataclass
class Measured:
    """One mode.

    Attributes:
        rate: trained rollouts a second.
        staleness: mean and maximum over rows.
        idle: share of the time in which servers had free capacity.
    """

    rate: float
    staleness: tuple[float, int]
    idle: float
    repeated: int


def measure(mode: str, load: Load, options: argparse.Namespace) -> Measured:
    """Run some steps of a mode.

    Raises:
        AssertionError: an agent got an error, a sample was trained twice, a row is too stale, or
            tokens were lost.
    """
    import agentlightning

    from agl_fast.rollouts import AgentModeDaemon
    from agl_fast.rollouts.group_schedule import GroupSchedule

    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=run_servers, args=(load, sender), daemon=True
    )
    process.start()
    addresses = [f"127.0.0.1:{port}" for port in receiver.recv()]
    store = agentlightning.InMemoryLightningStore(thread_safe=True)
    daemon = AgentModeDaemon(
        port=None,
        train_rollout_n=load.n_rollouts,
        train_information={"model": "policy", "temperature": 1.0},
        tokenizer=None,
        mini_batch_size=load.n_groups,
        pad_token_id=0,
        store=store,
        trace_aggregator={"level": "transition"},
        runner_silent_seconds=None,
    )
    oversample = 1.0 if mode == "sync" else options.oversample
    schedule = GroupSchedule(load.n_groups, 0 if mode == "sync" else options.staleness, oversample)
    n_warm, n_steps = options.warm, options.steps
    staleness: list[int] = []
    trained: list[str] = []
    n_in_flight = math.ceil(load.n_groups * load.n_rollouts * (oversample + 1))
    samples = Samples()
    repeated = 0
    with Agents(store, load, n_in_flight) as agents:
        if mode != "sync":
            daemon.begin_collection(samples, addresses, schedule, n_steps=n_warm + n_steps + 10)
        begin = busy = 0.0
        for step in range(n_warm + n_steps):
            if step == n_warm:
                begin, busy = time.perf_counter(), _busy(addresses)
            if mode == "sync":
                numbers = [samples.draw()["number"] for _ in range(load.n_groups)]
                daemon.policy_version = step
                daemon.set_up_data_and_server({"number": numbers}, addresses)
                daemon.run_until_all_finished(verbose=False)
                batch, metrics = daemon.training_batch(2048, 2048, "cpu", step)
                daemon.clear_data_and_server()
                time.sleep(load.update_seconds)
            else:
                daemon.collect_groups()
                if mode == "partial":
                    daemon.hold(options.drain)
                batch, metrics = daemon.training_batch(2048, 2048, "cpu", step)
                time.sleep(load.update_seconds)
                if mode == "overlap":
                    daemon.hold(options.drain)
                daemon.release(step + 1)
            repeated += int(metrics.get("training/proxy/repeated_tokens", 0))
            ages = step - batch.columns["policy_version_min_list"]
            staleness += ages.tolist()
            trained += list(dict.fromkeys(batch.columns["data_id_list"]))
            if options.verbose:
                print(mode, step, f"{time.perf_counter() - begin:.1f} s", ages.mean(), flush=True)
        seconds = time.perf_counter() - begin
        idle = 1 - (_busy(addresses) - busy) / (seconds * load.n_servers)
        assert set(agents.statuses) == {200}, agents.statuses
        if mode != "sync":
            daemon.end_collection()
        daemon.stop()
    process.terminate()
    assert len(trained) == len(set(trained)) == (n_warm + n_steps) * load.n_groups
    assert max(staleness) <= schedule.max_staleness
    rate = n_steps * load.n_groups * load.n_rollouts / seconds
    return Measured(rate, (sum(staleness) / len(staleness), max(staleness)), idle, repeated)


def _busy(addresses: list[str]) -> float:
    async def ask() -> float:
        async with aiohttp.ClientSession() as client:
            total = 0.0
            for each in addresses:
                async with client.get(f"http://{each}/busy") as reply:
                    total += (await reply.json())["busy"]
            return total

    return asyncio.run(ask())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", nargs="+", default=["sync", "partial", "overlap"])
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each mode")
    parser.add_argument("--warm", type=int, default=2, help="steps before")
    parser.add_argument("--ideal-seconds", type=float, default=Load.ideal_seconds)
    parser.add_argument("--tool-seconds", type=float, default=Load.tool_seconds)
    parser.add_argument("--oversample", type=float, default=3.0)
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--drain", type=float, default=1.0)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    load = Load(ideal_seconds=options.ideal_seconds, tool_seconds=options.tool_seconds)
    n = load.n_groups * load.n_rollouts
    bounds = {
        "sync": n / (load.ideal_seconds + load.update_seconds),
        "partial": n / (load.ideal_seconds + load.update_seconds),
        "overlap": n / load.ideal_seconds,
    }
    measured = {mode: measure(mode, load, options) for mode in options.modes}
    base = measured.get("sync")
    print(
        f"{load.n_groups} groups of {load.n_rollouts} rollouts a step, oversample "
        f"{options.oversample:g}, max_staleness {options.staleness}; the bound: servers and "
        "trainer never idle\n\n"
        "| mode | rollouts/s | to sync | of the bound | staleness mean, max | servers idle | "
        "repeated tokens |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    )
    for mode, found in measured.items():
        ratio = f"{found.rate / base.rate:.2f}" if base else ""
        print(
            f"| {mode} | {found.rate:.1f} | {ratio} | {found.rate / bounds[mode]:.2f} | "
            f"{found.staleness[0]:.2f}, {found.staleness[1]} | {found.idle:.0%} | "
            f"{found.repeated} |"
        )


if __name__ == "__main__":
    main()
