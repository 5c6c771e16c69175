"""An event loop on a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any, TypeVar

from agl_fast.verl.supervision.waits import Limit

T = TypeVar("T")

_LOOK_SECONDS = 1.0
_STOP_SECONDS = 10.0


class LoopThread:
    """Runs coroutines for callers on other threads, from construction until ``stop``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def run(
        self,
        coroutine: Coroutine[Any, Any, T],
        *,
        what: str,
        limit: Limit | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> T:
        """The coroutine's result. It is cancelled when the caller is interrupted.

        Args:
            what: names it in errors.
            limit: the longest it may take; None: it knows its own limits.
            meanwhile: called about once a second on the caller's thread; what it raises ends the
                wait.

        Raises:
            TimeoutError: it took too long.
            RuntimeError: the thread was stopped.
        """
        if not self._thread.is_alive():
            coroutine.close()
            raise RuntimeError(f"{what}: the thread {self._name} was stopped")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            self._wait(future, what, limit, meanwhile)
        except BaseException:
            future.cancel()
            raise
        return future.result()

    def _wait(
        self,
        future: Future[T],
        what: str,
        limit: Limit | None,
        meanwhile: Callable[[], None] | None,
    ) -> None:
        waited = 0.0
        while not future.done():
            left = _LOOK_SECONDS if limit is None else min(_LOOK_SECONDS, limit.seconds - waited)
            if left <= 0:
                raise TimeoutError(f"{what} did not finish within {limit}")
            wait([future], timeout=left)
            waited += left
            if not self._thread.is_alive():
                raise RuntimeError(f"{what}: the thread {self._name} was stopped")
            if meanwhile is not None and not future.done():
                meanwhile()

    def stop(self) -> None:
        """Cancel what runs and end the thread; twice does no harm."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_STOP_SECONDS)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            running = asyncio.all_tasks(self._loop)
            for task in running:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*running, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()
