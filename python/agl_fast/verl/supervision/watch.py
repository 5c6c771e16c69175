"""Waits that end when time is up, or when what they wait for has died."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
import ray

from agl_fast.verl.supervision.deadlines import default_deadlines
from agl_fast.verl.supervision.waits import Limit, deadline

CHECK_SECONDS = 2.0
ANSWER_SECONDS = 10.0
FAILURES_IN_A_ROW = 3
MAX_THREADS = 64
WORKER_SECONDS = 10.0  # between two questions to the training workers

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


@contextmanager
def watched(
    what: str, limit: Limit | float, check: Callable[[], None] | None = None
) -> Iterator[None]:
    """Interrupt the block when it takes too long, or when `check` raises.

    On another thread than the main one nothing can interrupt it, and it is only run.

    Args:
        what: names the block in errors.
        limit: a limit of the configuration, or seconds.
        check: called every few seconds on a thread of its own.

    Raises:
        TimeoutError: the block took longer.
        RuntimeError: `check` raised; its error is the cause.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    watcher = _Watcher(check)
    try:
        with deadline(what, limit):
            watcher.start()
            try:
                yield
            finally:
                watcher.stop()
    except TimeoutError:
        if watcher.found is None:
            raise
        raise RuntimeError(f"{what}: {watcher.found}") from watcher.found
    except Exception as error:
        if watcher.found is not None and watcher.found is not error:
            raise RuntimeError(f"{what}: {watcher.found}") from error
        raise


class _Watcher:
    def __init__(self, check: Callable[[], None] | None) -> None:
        self.found: Exception | None = None
        self._check = check
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="agl_fast-watch", daemon=True)

    def start(self) -> None:
        if self._check is not None:
            self._thread.start()

    def stop(self) -> None:
        with self._lock:  # no interrupt after the block
            self._stopped.set()

    def _watch(self) -> None:
        assert self._check is not None
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        while not self._stopped.wait(CHECK_SECONDS):
            try:
                self._check()
            except Exception as error:
                with self._lock:
                    if not self._stopped.is_set():
                        self.found = error
                        signal.pthread_kill(main_thread, signal.SIGALRM)  # ends the deadline
                return


class ServersAlive:
    """Raises once a vLLM server is dead or has been silent for too long.

    Every server is asked at the same time, so that one that is slow hides no other and ages none.
    One failure proves nothing, except that of a server whose actor has died.

    Args:
        addresses: `host:port` of each server.
        handles: their Ray actors.
        silent: how long one may go without an answer. On a busy machine it may be slow. None: the
            default of the configuration.
    """

    def __init__(
        self, addresses: Sequence[str], handles: Sequence[Any], silent: Limit | None = None
    ) -> None:
        self._silent = silent or default_deadlines().server_silent
        self._servers = list(zip(addresses, handles, strict=True))
        self._answered_at: dict[str, float] = {}
        self._failures: Counter[str] = Counter()
        # Its own addresses only: no proxy of the environment is asked.
        self._client = httpx.Client(
            timeout=ANSWER_SECONDS,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, keepalive_expiry=CHECK_SECONDS),
        )

    def __call__(self) -> None:
        begin = time.monotonic()
        errors = _at_once(self._ask, self._servers)
        for (address, _), error in zip(self._servers, errors, strict=True):
            since = self._answered_at.setdefault(address, begin)
            if error is None:
                self._answered_at[address] = time.monotonic()
                self._failures[address] = 0
                continue
            self._failures[address] += 1
            if self._failures[address] < FAILURES_IN_A_ROW:
                continue
            if isinstance(error, httpx.HTTPStatusError):
                what = str(error).splitlines()[0]  # httpx adds a link
                raise RuntimeError(f"vLLM server {address} is dead: {what}") from error
            if time.monotonic() - since > self._silent.seconds:
                raise RuntimeError(
                    f"vLLM server {address} has not answered for {self._silent}: {error!r}"
                ) from error

    def begin(self) -> None:
        """Start anew after a time in which nobody asked."""
        self._answered_at.clear()
        self._failures.clear()

    def _ask(self, server: tuple[str, Any]) -> httpx.HTTPError | None:
        address, handle = server
        try:
            self._client.get(f"http://{address}/health").raise_for_status()
        except httpx.HTTPError as error:
            _require_living_actor(f"vLLM server {address}", handle)
            return error
        return None


class WorkersAlive:
    """Raises once a training worker is dead, which otherwise shows at the next update only.

    Args:
        workers: Ray actors, idle when they are asked.
    """

    def __init__(self, workers: Sequence[Any]) -> None:
        self._workers = list(workers)
        self._asked_at = 0.0

    def __call__(self) -> None:
        if time.monotonic() - self._asked_at < WORKER_SECONDS:
            return
        _at_once(lambda worker: _require_living_actor("a training worker", worker), self._workers)
        self._asked_at = time.monotonic()


def _at_once(ask: Callable[[Asked], Answer], asked: Sequence[Asked]) -> list[Answer]:
    """The answers in the order of the asked; the first error where one raises."""
    if not asked:
        return []
    with ThreadPoolExecutor(min(len(asked), MAX_THREADS), "agl_fast-ask") as threads:
        return list(threads.map(ask, asked))


def _require_living_actor(what: str, handle: Any) -> None:
    try:
        ray.get(handle.__ray_ready__.remote(), timeout=ANSWER_SECONDS)
    except ray.exceptions.RayActorError as error:
        raise RuntimeError(f"{what} is dead: {error}") from error
    except ray.exceptions.GetTimeoutError:
        return  # busy, not dead
