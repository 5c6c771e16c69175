"""The identity of a run, and how a runner process learns it."""

from __future__ import annotations

import getpass
import inspect
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from agl_fast.verl.supervision.waits import Limit

# Names the run that the runners of a program join; `python -m agl_fast join --run` sets it.
JOIN_VARIABLE = "AGL_FAST_JOIN_RUN"
# The key of the store's statistics under which a run gives its identity.
STATISTICS_KEY = "agl_fast_run"
# The key of a rollout's metadata that has its run's id.
ROLLOUT_KEY = "agl_fast_run"
# The store's methods that take a worker name.
NAMED_METHODS = (
    "dequeue_rollout",
    "dequeue_many_rollouts",
    "start_rollout",
    "start_attempt",
    "update_worker",
)
_ANSWER_SECONDS = 5.0
_RETRY_SECONDS = 1.0


class JoinRefused(RuntimeError):
    """The run at the store's address takes no runners of this process."""


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """A run, as its store gives it to runners.

    Attributes:
        run_id: in the worker names of its runners.
        description: program, process, user and host of the driver.
        takes_joiners: whether runners may join without naming the run: it has none of its own.
        store_answer_seconds: `agentlightning.deadlines.store_answer_seconds`; None: no limit.
    """

    run_id: str
    description: str
    takes_joiners: bool
    store_answer_seconds: float | None = None

    @classmethod
    def new(cls, *, takes_joiners: bool, store_answer_seconds: float | None = None) -> RunIdentity:
        this_process = _describe_this_process()
        return cls(secrets.token_hex(4), this_process, takes_joiners, store_answer_seconds)

    def __str__(self) -> str:
        return f"run {self.run_id} ({self.description})"

    def statistics(self) -> dict[str, Any]:
        return {STATISTICS_KEY: asdict(self)}

    def owns(self, worker_id: str | None) -> bool:
        """Whether the worker name is one of `worker_name`."""
        return worker_id is not None and f"@{self.run_id}." in worker_id

    def worker_name(self, worker_id: str | None) -> str:
        """`Worker-0@RUN.HOST.PID-…`: unique for every process that ever runs."""
        return f"{worker_id or 'Worker'}@{self.run_id}.{_process_name()}"


def _describe_this_process() -> str:
    program = os.path.basename(sys.argv[0]) or "python"
    return f"{program}, process {os.getpid()} of {getpass.getuser()} on {socket.gethostname()}"


_process: tuple[int, str] = (0, "")


def _process_name() -> str:
    global _process
    if _process[0] != os.getpid():  # also in a fork
        host = re.sub(r"[^\w.-]", "-", socket.gethostname())
        _process = (os.getpid(), f"{host}.{os.getpid()}-{secrets.token_hex(3)}")
    return _process[1]


_current: RunIdentity | None = None
_is_known = False


def current_run() -> RunIdentity | None:
    """The run that this process drives or works for; None: one of another program, or none yet."""
    return _current


def knows_its_run() -> bool:
    """Whether this process has learned which run it drives or works for."""
    return _is_known


def set_current_run(run: RunIdentity | None) -> None:
    global _current, _is_known
    _current, _is_known = run, True


def store_answer_limit() -> Limit | None:
    """How long this process may wait for an answer of its run's store; None: no limit of ours."""
    run = current_run()
    if run is None or run.store_answer_seconds is None:
        return None
    return Limit(run.store_answer_seconds, "agentlightning.deadlines.store_answer_seconds")


def run_at(url: str) -> RunIdentity | None:
    """The run whose store listens at `url`; None: the store is of no run of agl_fast.

    Raises:
        httpx.HTTPError: nothing answers, or no store.
    """
    with httpx.Client(timeout=_ANSWER_SECONDS, trust_env=False) as client:
        answer = client.get(f"{url}/v1/agl/statistics").raise_for_status()
    try:
        found = answer.json().get(STATISTICS_KEY)
    except ValueError as error:
        raise httpx.DecodingError(f"{url} answers without JSON") from error
    return None if found is None else RunIdentity(**found)


def join_run(url: str, wanted: str | None) -> RunIdentity | None:
    """Wait for the store at `url` and learn its run; None: it is of no run of agl_fast.

    Args:
        wanted: the id of the run to join; None: a run that takes joiners.

    Raises:
        JoinRefused: another run is there, or one that has runners of its own.
    """
    while True:
        try:
            run = run_at(url)
        except httpx.HTTPError:
            time.sleep(_RETRY_SECONDS)
            continue
        break
    if wanted is not None and (run is None or run.run_id != wanted):
        there = "a store of no run of agl_fast" if run is None else str(run)
        raise JoinRefused(f"run {wanted} is not at {url}: {there} is there")
    if run is not None and wanted is None and not run.takes_joiners:
        raise JoinRefused(
            f"{run} at {url} has runners of its own and takes no others; to join it all the same: "
            f"python -m agl_fast join --run {run.run_id}"
        )
    return run


def with_worker_names(store: Any, run: RunIdentity) -> None:
    """Let the store object, used by a runner, send unique worker names that carry the run's id."""
    for method in NAMED_METHODS:
        setattr(store, method, _named(getattr(store, method), run))


def _named(
    method: Callable[..., Awaitable[Any]], run: RunIdentity
) -> Callable[..., Awaitable[Any]]:
    signature = inspect.signature(method)

    async def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["worker_id"] = run.worker_name(bound.arguments.get("worker_id"))
        return await method(*bound.args, **bound.kwargs)

    return call
