"""Agent-lightning's server of mode v0, on its own thread."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import warnings
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any, TypeVar

import httpx
from agentlightning.server import AgentLightningServer, ServerDataStore
from agentlightning.types import RolloutLegacy, Task

from agl_fast.verl.addresses import is_loopback, url_host

T = TypeVar("T")

logger = logging.getLogger(__name__)

START_SECONDS = 20.0
ANSWER_SECONDS = 120.0
STOP_SECONDS = 10.0
_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Claim:
    """A client has taken a task; corresponds to an attempt in a store.

    Attributes:
        sequence_id: number of the claim, from 1.
        start_time: of the first claim, in seconds since the epoch.
    """

    sequence_id: int
    start_time: float


@dataclass(slots=True)
class LegacyTask:
    """An enqueued task.

    Attributes:
        start_time: of enqueueing, in seconds since the epoch.
        attempt: None until a client takes it.
        posted: the first rollout that a client posted.
        withdrawn: no client gets it any more, and posts are ignored.
    """

    rollout_id: str
    start_time: float
    attempt: Claim | None = None
    posted: RolloutLegacy | None = None
    withdrawn: bool = False

    @property
    def is_wanted(self) -> bool:
        return self.posted is None and not self.withdrawn


@dataclass(frozen=True, slots=True)
class Posted:
    """A client has posted a rollout, possibly a repeated or unknown one."""

    rollout_id: str
    status: str
    end_time: float


class _Tasks(ServerDataStore):
    """Agent-lightning's data with withdrawn tasks, and with a record of all posts."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: dict[str, LegacyTask] = {}
        self.posts: list[Posted] = []

    async def get_next_task(self) -> Task | None:
        while (task := await super().get_next_task()) is not None:
            known = self.tasks.get(task.rollout_id)
            if known is not None and known.is_wanted:
                first = known.attempt.start_time if known.attempt else time.time()
                known.attempt = Claim(task.num_claims or 1, first)
                return task
            await self._drop(RolloutLegacy(rollout_id=task.rollout_id))
        return None

    async def store_rollout(self, rollout: RolloutLegacy) -> None:
        await self._drop(rollout)
        task = self.tasks.get(rollout.rollout_id)
        if task is not None and task.is_wanted:
            task.posted = rollout
        self.posts.append(Posted(rollout.rollout_id, "succeeded", time.time()))

    async def _drop(self, rollout: RolloutLegacy) -> None:
        """Remove a task from Agent-lightning's queues."""
        await super().store_rollout(rollout)
        await self.retrieve_rollout(rollout.rollout_id)


class _Server(AgentLightningServer):
    """Agent-lightning's server with `_Tasks` as its data."""

    tasks: _Tasks

    @asynccontextmanager
    async def _lifespan(self, app: Any) -> AsyncIterator[None]:
        async with super()._lifespan(app):
            self.tasks = self._store = _Tasks()
            yield


class LegacyServer:
    """Serve tasks to ``AgentLightningClient``s and receive the rollouts that they post.

    ``publish``, ``enqueue`` and ``take_posted`` may be awaited in any event loop.

    Args:
        host: address to bind. The protocol has no authentication: anyone who can reach the address
            can take tasks and post rollouts.
        task_timeout_seconds: a task taken longer ago goes to another client.
    """

    def __init__(self, host: str, port: int, task_timeout_seconds: float) -> None:
        self._host = host
        self._port = port
        self._task_timeout_seconds = task_timeout_seconds
        self._server: _Server | None = None
        self._thread: Thread | None = None

    def start(self) -> None:
        """Bind and serve; idempotent.

        Raises:
            OSError: host and port cannot be bound.
            RuntimeError: the server ended, or does not answer in time.
        """
        if self._thread is not None:
            return
        if not is_loopback(self._host):
            logger.warning(
                "The server of mode v0 on %s:%d is unauthenticated: anyone who can reach it can "
                "take tasks and post rollouts.",
                self._host,
                self._port,
            )
        self._require_free_port()
        with warnings.catch_warnings():
            # Mode v0 was chosen explicitly: no deprecation warning in every run.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._server = _Server(self._host, self._port, self._task_timeout_seconds)
        for name in ("uvicorn.error", "uvicorn.access"):  # clients poll for tasks
            logging.getLogger(name).setLevel(logging.WARNING)
        self._thread = Thread(target=self._serve, name="agl_fast-v0-server", daemon=True)
        self._thread.start()
        try:
            self._wait_until_it_answers()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop serving; idempotent.

        Raises:
            TimeoutError: the thread does not end.
        """
        server, thread = self._server, self._thread
        self._server = self._thread = None
        if server is None or thread is None:
            return
        if thread.is_alive() and server.loop is not None:
            asyncio.run_coroutine_threadsafe(server.stop(), server.loop)
        thread.join(STOP_SECONDS)
        if thread.is_alive():
            raise TimeoutError(f"the server of mode v0 does not stop within {STOP_SECONDS:g} s")

    async def publish(self, resources: dict[str, Any]) -> str:
        """Publish resources; returns their id."""
        return str(await self._ask(self._running().update_resources(resources)))

    async def enqueue(self, requests: Sequence[Any]) -> list[LegacyTask]:
        """Enqueue one task per request.

        Args:
            requests: ``EnqueueRolloutRequest``s.
        """
        return await self._ask(self._enqueue(requests))

    async def take_posted(self) -> list[Posted]:
        """The posts since the last call."""
        return await self._ask(self._take_posted())

    def task(self, rollout_id: str) -> LegacyTask:
        return self._running().tasks.tasks[rollout_id]

    def withdraw(self, rollout_id: str) -> None:
        """Withdraw a task: no client gets it any more, and posts are ignored."""
        self.task(rollout_id).withdrawn = True

    def forget(self, rollout_id: str) -> None:
        """Delete a task."""
        self._running().tasks.tasks.pop(rollout_id, None)

    def _running(self) -> _Server:
        if self._server is None or self._thread is None or not self._thread.is_alive():
            raise RuntimeError("the server of mode v0 is not running")
        return self._server

    async def _enqueue(self, requests: Sequence[Any]) -> list[LegacyTask]:
        server = self._running()
        queued = []
        for request in requests:
            # Registered before a client can take it: there is no await in between.
            rollout_id = await server.queue_task(
                request.input, request.mode, request.resources_id, request.metadata
            )
            queued.append(LegacyTask(rollout_id, time.time()))
            server.tasks.tasks[rollout_id] = queued[-1]
        return queued

    async def _take_posted(self) -> list[Posted]:
        tasks = self._running().tasks
        posts, tasks.posts = tasks.posts, []
        return posts

    async def _ask(self, answer: Coroutine[Any, Any, T]) -> T:
        loop = self._running().loop
        assert loop is not None
        future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answer, loop))
        return await asyncio.wait_for(future, ANSWER_SECONDS)

    def _serve(self) -> None:
        assert self._server is not None
        asyncio.run(self._server.run_forever())

    def _require_free_port(self) -> None:
        """Raise OSError for a port in use; uvicorn would only log it and end the thread."""
        try:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            socket.create_server((self._host, self._port), family=family).close()
        except OSError as error:
            raise OSError(
                error.errno,
                f"agentlightning.port={self._port} on {self._host} cannot be bound: "
                f"{error.strerror}. Another run may have it: choose another port",
            ) from error

    def _wait_until_it_answers(self) -> None:
        host = url_host("127.0.0.1" if self._host in ("", "0.0.0.0", "::") else self._host)
        end = time.monotonic() + START_SECONDS
        with httpx.Client(timeout=1.0, trust_env=False) as client:
            while time.monotonic() < end:
                self._running()
                try:
                    client.get(f"http://{host}:{self._port}/resources/latest")
                    return
                except httpx.TransportError:
                    time.sleep(_LOOK_SECONDS)
        raise RuntimeError(f"the server of mode v0 has not answered within {START_SECONDS:g} s")
