"""Agent-lightning's client-server strategy, with runners that belong to one run."""

from __future__ import annotations

import asyncio
import functools
import logging
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from agentlightning.execution import ClientServerExecutionStrategy

from agl_fast.verl.addresses import url_host
from agl_fast.verl.membership.guard import Guard
from agl_fast.verl.membership.identity import (
    JOIN_VARIABLE,
    JoinRefused,
    RunIdentity,
    current_run,
    join_run,
    run_at,
    set_current_run,
    with_worker_names,
)
from agl_fast.verl.membership.parent import end_with_parent
from agl_fast.verl.store_sessions import close_sessions_of_heartbeats

logger = logging.getLogger(__name__)

# Agent-lightning logs the traceback of one error in each of these before it raises it.
_REPEATED = {
    "agentlightning.trainer.trainer": ("Algorithm bundle encountered an error.",),
    "agentlightning.execution.client_server": (
        "Algorithm bundle crashed; signaling stop event",
        "Unhandled exception in execute method",
    ),
}
_LOOK_SECONDS = 0.05
PORT_OF_TRAINER = (
    "agentlightning.Trainer(port=…), the environment variable AGL_SERVER_PORT, or the command's "
    "key agentlightning.store_port"
)


def bind_runners_to_runs(is_ours: Callable[[Any], bool]) -> None:
    """Monkeypatch `ClientServerExecutionStrategy` of agentlightning 0.3.0; twice does no harm.

    `execute` starts runners before the store's port is bound, under names that repeat in every
    program, and the store gives work to whoever asks. With this patch the port is tried first, the
    store serves the run's own runners only, runner processes end with the process that forked them,
    and Ctrl-C ends in exit status 130 instead of 0. Programs whose algorithm is another one are
    left as they are. Obsolete with a release of agentlightning that authenticates runners.

    Args:
        is_ours: whether an algorithm is agl_fast's.
    """
    strategy: Any = ClientServerExecutionStrategy
    if hasattr(strategy.execute, "__wrapped__"):
        return
    strategy.execute = _execute_of_one_run(strategy.execute, is_ours)
    strategy._execute_algorithm = _end_with_runner(strategy._execute_algorithm)
    strategy._execute_runner = _execute_member(strategy._execute_runner)


def _execute_of_one_run(execute: Any, is_ours: Callable[[Any], bool]) -> Any:
    @functools.wraps(execute)
    def execute_of_one_run(self: Any, algorithm: Any, runner: Any, store: Any) -> None:
        self._agl_fast_parent = os.getpid()
        if self.role == "runner":
            set_current_run(_joined(self))
            execute(self, algorithm, runner, store)
            return
        made_by = getattr(algorithm, "keywords", {}).get("algorithm")
        if made_by is None or not is_ours(made_by):
            execute(self, algorithm, runner, store)
            return
        if self.managed_store:
            require_free_port(self.server_host, self.server_port, PORT_OF_TRAINER)
        deadlines = made_by.config.agentlightning.deadlines
        run = RunIdentity.new(
            takes_joiners=self.role == "algorithm",
            store_answer_seconds=float(deadlines.store_answer_seconds),
        )
        watched, patience = _Watched(algorithm, self), self.graceful_timeout
        try:
            with _current(run), _guarded(store, run), _errors_logged_once():
                execute(self, watched, runner, store)
        finally:
            self.graceful_timeout = patience
        if watched.interrupted:
            sys.exit(130)  # Agent-lightning returns as if the run were done

    return execute_of_one_run


def _end_with_runner(execute_algorithm: Any) -> Any:
    @functools.wraps(execute_algorithm)
    async def end_with_runner(self: Any, algorithm: Any, store: Any, stop_evt: Any) -> None:
        if current_run() is not None and os.getpid() != self._agl_fast_parent:
            end_with_parent(self._agl_fast_parent)  # main_process="runner"
        await execute_algorithm(self, algorithm, store, stop_evt)

    return end_with_runner


def _execute_member(execute_runner: Any) -> Any:
    @functools.wraps(execute_runner)
    async def execute_member(
        self: Any, runner: Any, worker_id: int, store: Any, stop_evt: Any
    ) -> None:
        run = current_run()
        if run is None:
            await execute_runner(self, runner, worker_id, store, stop_evt)
            return
        if os.getpid() != self._agl_fast_parent:
            end_with_parent(self._agl_fast_parent)

        async def of_run(store: Any, worker_id: int, stop_evt: Any) -> None:
            with_worker_names(store, run)
            close_sessions_of_heartbeats(store)
            await runner(store, worker_id, stop_evt)

        await execute_runner(self, of_run, worker_id, store, stop_evt)

    return execute_member


def _joined(strategy: Any) -> RunIdentity | None:
    if not strategy.managed_store:
        return None
    url = _url(strategy.server_host, strategy.server_port)
    run = join_run(url, os.environ.get(JOIN_VARIABLE))
    if run is not None:
        logger.info("the agents work for %s at %s", run, url)
    return run


def require_free_port(host: str, port: int, keys: str) -> None:
    """Raise OSError where the store's port is taken.

    Args:
        keys: what sets the port.
    """
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        try:
            owner = run_at(_url(host, port))
        except httpx.HTTPError:
            owner = None
        by = f"; {owner} has it" if owner is not None else ""
        raise OSError(
            f"the store's port {port}: expected a free port on {host}: {error}{by}. Set another "
            f"one: {keys}"
        ) from None


def _url(host: str, port: int) -> str:
    return f"http://{url_host(host)}:{port}"


class _Watched:
    """An algorithm bundle that remembers a KeyboardInterrupt, and that sees its runners off.

    Agent-lightning stops the store before it tells the runners to end: for each of them a success
    could end in tracebacks about the store that has gone.

    Attributes:
        interrupted: whether Ctrl-C or SIGTERM ended it.
    """

    def __init__(self, algorithm: Any, strategy: Any) -> None:
        self.interrupted = False
        self._algorithm = algorithm
        self._strategy = strategy

    async def __call__(self, store: Any, stop_evt: Any) -> None:
        try:
            await self._algorithm(store, stop_evt)
            stop_evt.set()
            await self._runners_have_left()
        except KeyboardInterrupt:
            self.interrupted = True
            raise

    async def _runners_have_left(self) -> None:
        end = time.monotonic() + self._strategy.graceful_timeout
        while time.monotonic() < end and any(map(_is_runner, multiprocessing.active_children())):
            await asyncio.sleep(_LOOK_SECONDS)
        # Agent-lightning waits for so long again, and then interrupts them.
        self._strategy.graceful_timeout = max(0.0, end - time.monotonic())


def _is_runner(process: Any) -> bool:
    return bool(process.name.startswith("runner-"))


@contextmanager
def _current(run: RunIdentity) -> Iterator[None]:
    before = current_run()
    set_current_run(run)
    try:
        yield
    finally:
        set_current_run(before)


@contextmanager
def _guarded(store: Any, run: RunIdentity) -> Iterator[None]:
    guard = Guard(store, run)
    guard.install()
    try:
        yield
    finally:
        guard.remove()


@contextmanager
def _errors_logged_once() -> Iterator[None]:
    """Leave the error of the algorithm to whoever catches it, in the driver's process."""
    driver = os.getpid()

    def is_new(record: logging.LogRecord) -> bool:
        return os.getpid() != driver or record.msg not in _REPEATED[record.name]

    repeating = [logging.getLogger(name) for name in _REPEATED]
    for each in repeating:
        each.addFilter(is_new)
    try:
        yield
    finally:
        for each in repeating:
            each.removeFilter(is_new)


__all__ = ["JoinRefused", "bind_runners_to_runs", "require_free_port"]
