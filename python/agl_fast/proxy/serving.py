"""A thread with an event loop of its own that serves HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from threading import Thread
from typing import Any, TypeVar

from aiohttp import web

from agl_fast.proxy.server import ProxyServer

START_SECONDS = 60.0
JOIN_SECONDS = 10.0
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

    def start(self, host: str, port: int | None) -> int:
        """Bind and serve.

        Returns:
            The port; without one given, the system chooses.

        Raises:
            OSError: host and port cannot be bound.
            TimeoutError: the thread does not come to it.
        """
        self._thread = Thread(
            target=lambda: asyncio.run(self._serve(host, port or 0)),
            name="agl-fast-proxy",
            daemon=True,
        )
        self._thread.start()
        return self._bound.result(START_SECONDS)

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

    def stop(self) -> None:
        """Stop serving; connections are closed.

        Raises:
            TimeoutError: the thread does not end within ``JOIN_SECONDS``.
        """
        if self._thread is None or not self._thread.is_alive():
            return
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive():
            raise TimeoutError(f"the proxy does not stop within {JOIN_SECONDS:g} s")

    async def _serve(self, host: str, port: int) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        await self._server.open()
        runner = web.ServerRunner(self._server.http_server(), shutdown_timeout=SHUTDOWN_SECONDS)
        try:
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
