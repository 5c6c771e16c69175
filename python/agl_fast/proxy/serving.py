"""A thread with an event loop of its own that serves HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from threading import Thread
from typing import Any, TypeVar

from aiohttp import web

from agl_fast.proxy.server import ProxyServer
from agl_fast.verl.supervision.waits import Limit

# Handlers get this long at the end; whoever stops the proxy has no agents left to wait for.
SHUTDOWN_SECONDS = 0.5
BACKLOG = 1024

T = TypeVar("T")


class ServingThread:
    """Serves until stopped. Once stopped, it cannot be started again."""

    def __init__(self, server: ProxyServer) -> None:
        self._server = server
        self._bound: Future[int] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: Thread | None = None

    def start(self, host: str, port: int | None, limit: Limit) -> int:
        """Bind and serve.

        Args:
            port: None: the system chooses.
            limit: how long it may take.

        Returns:
            The port.

        Raises:
            OSError: host and port cannot be bound.
            TimeoutError: the thread does not come to it in time.
        """
        self._thread = Thread(
            target=lambda: asyncio.run(self._serve(host, port or 0)),
            name="agl-fast-proxy",
            daemon=True,
        )
        self._thread.start()
        try:
            return self._bound.result(limit.seconds)
        except FutureTimeoutError as error:  # not yet the builtin one in Python 3.10
            if self._bound.done():
                raise
            raise TimeoutError(f"the proxy did not start within {limit}") from error

    def is_running(self) -> bool:
        # After a fork there is no thread in the child.
        return self._thread is not None and self._thread.is_alive()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """A coroutine's result, which runs in the server's event loop.

        Raises:
            RuntimeError: the thread does not serve.
        """
        assert self._loop is not None
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def stop(self, limit: Limit) -> None:
        """Stop serving; connections are closed.

        Raises:
            TimeoutError: the thread does not end in time.
        """
        if self._thread is None or not self._thread.is_alive():
            return
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(limit.seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"the proxy did not stop within {limit}")

    async def _serve(self, host: str, port: int) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        runner = web.ServerRunner(self._server.http_server(), shutdown_timeout=SHUTDOWN_SECONDS)
        try:
            await self._server.open()
            await runner.setup()
            site = web.TCPSite(runner, host, port, backlog=BACKLOG)
            await site.start()
        except BaseException as error:
            await self._end(runner)
            self._bound.set_exception(error)
            return
        try:
            self._bound.set_result(runner.addresses[0][1])
            await self._stop.wait()
        finally:
            await self._end(runner)

    async def _end(self, runner: web.ServerRunner) -> None:
        self._server.hang_up()
        await runner.cleanup()
        await self._server.close()
