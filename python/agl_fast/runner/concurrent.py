"""`ConcurrentRunner`: several rollouts of an `async def` agent in flight per process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import aiohttp
from agentlightning.execution.events import ExecutionEvent
from agentlightning.litagent import LitAgent
from agentlightning.runner import LitAgentRunner
from agentlightning.store.base import LightningStore
from agentlightning.tracer.base import Tracer
from agentlightning.types import AttemptedRollout, Hook, Rollout

from agl_fast.runner.heartbeats import heartbeats
from agl_fast.runner.rollout_tracer import RolloutTracer

logger = logging.getLogger(__name__)

# The longest delay until a stop is noticed.
EVENT_SECONDS = 0.1
# A longer delay of the event loop is the agent's fault.
BLOCKED_SECONDS = 2.0
LIVE = ("queuing", "preparing", "running", "requeuing")


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    rollout: AttemptedRollout
    task: asyncio.Task[None]


class ConcurrentRunner(LitAgentRunner[Any]):
    """Runs up to `rollouts_in_flight` rollouts of an `async def` agent at the same time.

    Agent-lightning's own runner executes one rollout per process, so `n_runners` bounds the batch
    of the vLLM servers. Pass this one to the trainer to have
    `n_runners` × `rollouts_in_flight` rollouts in flight::

        agl.Trainer(algorithm=VERL(config), n_runners=8,
                    runner=agl_fast.ConcurrentRunner(rollouts_in_flight=32))

    The agent must not block its event loop: no `time.sleep`, no synchronous HTTP client; move such
    work into `asyncio.to_thread`. Each rollout in flight has a worker id of its own in the store
    (`Worker-3.0`, `Worker-3.1`, …) and a heartbeat. A rollout that the store has cancelled, or
    given to another runner, is cancelled here as well.

    Args:
        tracer: a `RolloutTracer`, made here by default. Other tracers follow one rollout per
            process and are replaced with a warning.
        max_rollouts: the runner ends after this many. None: when the run ends.
        rollouts_in_flight: rollouts that run at the same time in this process, at least 1.
        poll_interval: seconds between two looks into an empty queue.
        heartbeat_interval: seconds between two heartbeats.

    Raises:
        ValueError: `rollouts_in_flight` is below 1.
        TypeError: `init` was given an agent without `async def` rollout methods.
    """

    def __init__(
        self,
        tracer: Tracer | None = None,
        max_rollouts: int | None = None,
        *,
        rollouts_in_flight: int = 16,
        poll_interval: float = 1.0,
        heartbeat_interval: float = 10.0,
    ) -> None:
        if rollouts_in_flight < 1:
            raise ValueError(f"rollouts_in_flight={rollouts_in_flight!r}: expected at least 1")
        if not isinstance(tracer, RolloutTracer):
            if tracer is not None:
                logger.warning(
                    "%s follows one rollout per process; ConcurrentRunner uses "
                    "agl_fast.RolloutTracer instead. Emitted rewards are stored as before.",
                    type(tracer).__name__,
                )
            tracer = RolloutTracer()
        super().__init__(
            tracer,
            max_rollouts=max_rollouts,
            poll_interval=poll_interval,
            heartbeat_interval=heartbeat_interval,
            interval_jitter=min(0.5, poll_interval / 2),
        )
        self.rollouts_in_flight = rollouts_in_flight
        self._rollout_tracer = tracer
        self._slot: ContextVar[int] = ContextVar("agl_fast_slot", default=0)

    def init(
        self, agent: LitAgent[Any], *, hooks: Sequence[Hook] | None = None, **kwargs: Any
    ) -> None:
        if not agent.is_async():
            raise TypeError(
                f"agent {type(agent).__name__}: expected `async def` rollout methods, as a "
                "synchronous agent blocks the other rollouts of its process. Leave `runner` out "
                "for one rollout per process"
            )
        super().init(agent, hooks=hooks, **kwargs)

    def get_worker_id(self) -> str:
        """The id under which the store knows the slot of the current rollout."""
        return self._worker_id_of(self._slot.get())

    def _worker_id_of(self, slot: int) -> str:
        name = str(super().get_worker_id())
        return name if self.rollouts_in_flight == 1 else f"{name}.{slot}"

    async def iter(self, *, event: ExecutionEvent | None = None) -> None:
        """Run rollouts of the store's queue until `event` is set or `max_rollouts` have run.

        Rollouts in flight are cancelled when the event is set: the run has ended.
        """
        store = self.get_store()
        flights: dict[int, _Flight] = {}
        n_begun = 0
        with heartbeats(store, lambda: self._worker_ids(flights), self._heartbeat_interval):
            watch = asyncio.create_task(self._cancel_ended(store, flights))
            try:
                while not _is_set(event) and (n_begun != self._max_rollouts or flights):
                    _drop_finished(flights)
                    if watch.done():
                        watch.result()  # raises: it ends by an error only
                    slot = self._free_slot(flights) if n_begun != self._max_rollouts else None
                    if slot is None:
                        await _wait_for_any(flights)
                        continue
                    rollout = await store.dequeue_rollout(worker_id=self._worker_id_of(slot))
                    if rollout is None:
                        await self._sleep_until_next_poll(event)
                        continue
                    flights[slot] = _Flight(rollout, asyncio.create_task(self._run(slot, rollout)))
                    n_begun += 1
            finally:
                watch.cancel()
                for flight in flights.values():
                    self._cancel(flight)
                tasks = [flight.task for flight in flights.values()]
                await asyncio.gather(watch, *tasks, return_exceptions=True)

    async def _run(self, slot: int, rollout: AttemptedRollout) -> None:
        self._slot.set(slot)  # of this task and those it creates
        await self._step_impl(rollout)

    def _free_slot(self, flights: Mapping[int, _Flight]) -> int | None:
        return next((n for n in range(self.rollouts_in_flight) if n not in flights), None)

    def _worker_ids(self, flights: Mapping[int, _Flight]) -> list[str]:
        return [self._worker_id_of(slot) for slot in sorted({0, *flights})]

    async def _cancel_ended(self, store: LightningStore, flights: Mapping[int, _Flight]) -> None:
        """Cancel rollouts that the store has cancelled, failed or given to another runner."""
        is_warned = False
        while True:
            due = time.monotonic() + self._heartbeat_interval
            await asyncio.sleep(self._heartbeat_interval)
            blocked = time.monotonic() - due
            if blocked > BLOCKED_SECONDS and not is_warned:
                is_warned = True
                logger.warning(
                    "The agent blocked the event loop of %d concurrent rollouts for %.1f s. Use "
                    "async clients, or move blocking work into asyncio.to_thread.",
                    len(flights),
                    blocked,
                )
            ids = [flight.rollout.rollout_id for flight in flights.values()]
            try:
                found = await store.query_rollouts(rollout_id_in=ids) if ids else []
            except (ConnectionError, aiohttp.ClientError, asyncio.TimeoutError) as error:
                logger.warning("The store did not list the rollouts in flight: %r", error)
                continue
            attempts = {each.rollout_id: each for each in found}
            for flight in list(flights.values()):
                if _has_ended(flight.rollout, attempts.get(flight.rollout.rollout_id)):
                    self._cancel(flight)

    def _cancel(self, flight: _Flight) -> None:
        self._rollout_tracer.end(flight.rollout.rollout_id, flight.rollout.attempt.attempt_id)
        flight.task.cancel()


def _is_set(event: ExecutionEvent | None) -> bool:
    return event is not None and event.is_set()


def _drop_finished(flights: dict[int, _Flight]) -> None:
    """Free the slots of finished rollouts; raise what was not an exception of the agent."""
    for slot, flight in list(flights.items()):
        if flight.task.done():
            del flights[slot]
            if not flight.task.cancelled():
                flight.task.result()


async def _wait_for_any(flights: Mapping[int, _Flight]) -> None:
    if tasks := [flight.task for flight in flights.values()]:
        await asyncio.wait(tasks, timeout=EVENT_SECONDS, return_when=asyncio.FIRST_COMPLETED)


def _has_ended(ours: AttemptedRollout, now: Rollout | None) -> bool:
    """Whether the store waits for this attempt no longer. A rollout it does not list is unknown."""
    if now is None:
        return False
    attempt = getattr(now, "attempt", None)
    is_replaced = attempt is not None and attempt.attempt_id != ours.attempt.attempt_id
    return is_replaced or now.status not in LIVE
