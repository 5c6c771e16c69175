"""`RolloutTracer`: the spans of rollouts that share a process, kept apart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from agentlightning.store.base import LightningStore
from agentlightning.tracer.base import (
    Tracer,
    clear_active_tracer,
    get_active_tracer,
    set_active_tracer,
)
from agentlightning.tracer.dummy import DummyTracer
from agentlightning.types import Attributes, Span, SpanCoreFields, SpanRecordingContext, TraceStatus

from agl_fast.verl.membership import store_answer_limit
from agl_fast.verl.store_sessions import close_session
from agl_fast.verl.supervision.loop_thread import LoopThread


class RolloutEndedError(RuntimeError):
    """The store ended a rollout while its agent was still running."""


@dataclass(slots=True, eq=False)
class _Trace:
    """The spans of one attempt at a rollout.

    Attributes:
        ended_by_store: the attempt was cancelled or replaced; its task is being cancelled.
    """

    rollout_id: str
    attempt_id: str
    spans: list[Span] = field(default_factory=list)
    is_open: bool = True
    ended_by_store: bool = False


class RolloutTracer(Tracer):
    """Sends emitted spans to the store under the rollout whose code emitted them.

    Agent-lightning's OtelTracer and AgentOpsTracer follow one rollout per process: the rollout id
    is state of a process-wide span processor and exporter. This tracer keeps it in a context
    variable, which every asyncio task inherits from the task that created it; `asyncio.to_thread`
    carries it into threads. It records what agents emit (rewards, messages, annotations,
    operations). It does not instrument the openai client: the proxy records those calls.

    A span is stored before `emit_reward` returns, so its sequence number lies between those of the
    calls before and after it. The event loop waits for the store meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self._trace: ContextVar[_Trace | None] = ContextVar("agl_fast_rollout", default=None)
        self._open: dict[tuple[str, str], _Trace] = {}
        self._thread: LoopThread | None = None

    def init_worker(self, worker_id: int, store: LightningStore | None = None) -> None:
        super().init_worker(worker_id, store)
        self._thread = LoopThread("agl_fast-spans")

    def teardown_worker(self, worker_id: int) -> None:
        super().teardown_worker(worker_id)
        if self._thread is not None:
            what = "closing the connections to the store"
            self._thread.run(close_session(self._store), what=what, limit=store_answer_limit())
            self._thread.stop()
            self._thread = None

    def trace_context(
        self,
        name: str | None = None,
        *,
        store: LightningStore | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> AbstractAsyncContextManager[Any]:
        """Assign the spans of the block, and of tasks created in it, to an attempt at a rollout.

        Raises:
            ValueError: the ids are missing, or `store` is given (`init_worker` sets it).
            RolloutEndedError: `end` was called for the attempt, and the task was cancelled.
        """
        if rollout_id is None or attempt_id is None or store is not None:
            raise ValueError(
                f"trace_context(rollout_id={rollout_id!r}, attempt_id={attempt_id!r}): expected "
                "both ids, and the store in init_worker"
            )
        return self._context(_Trace(rollout_id, attempt_id))

    @asynccontextmanager
    async def _context(self, trace: _Trace) -> AsyncIterator[None]:
        if not self._open and get_active_tracer() is not self:
            set_active_tracer(self)  # the emitters use the one active tracer of the process
        self._open[trace.rollout_id, trace.attempt_id] = trace
        self._trace.set(trace)
        try:
            yield
        except asyncio.CancelledError as cancelled:
            if not trace.ended_by_store:
                raise
            # Agent-lightning's runner marks an attempt as failed for exceptions only; a cancelled
            # one would count as succeeded.
            raise RolloutEndedError(
                f"rollout {trace.rollout_id} was cancelled or given to another runner"
            ) from cancelled
        finally:
            trace.is_open = False
            del self._open[trace.rollout_id, trace.attempt_id]
            if not self._open:
                clear_active_tracer()

    def end(self, rollout_id: str, attempt_id: str) -> None:
        """Turn the cancellation of the attempt's task, which follows, into a RolloutEndedError."""
        trace = self._open.get((rollout_id, attempt_id))
        if trace is not None:
            trace.ended_by_store = True

    def create_span(
        self,
        name: str,
        attributes: Attributes | None = None,
        timestamp: float | None = None,
        status: TraceStatus | None = None,
    ) -> SpanCoreFields:
        """Store a span of the current rollout.

        Raises:
            RuntimeError: the caller's context belongs to no open rollout, or the store failed.
            TimeoutError: the store took longer than its run allows
                (`agentlightning.deadlines.store_answer_seconds`).
        """
        fields = DummyTracer().create_span(name, attributes, timestamp, status)
        self._store_span(fields)
        return fields

    @contextmanager
    def operation_context(
        self,
        name: str,
        attributes: Attributes | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
    ) -> Iterator[SpanRecordingContext]:
        """Record the block as one span of the current rollout, stored when the block ends."""
        with DummyTracer().operation_context(
            name, attributes, start_time or time.time(), end_time
        ) as recording:
            try:
                yield recording
            finally:
                recording.finalize(end_time)
                self._store_span(recording.get_recorded_span())

    def get_last_trace(self) -> list[Span]:
        """The spans of the current task's rollout, also after its `trace_context`."""
        trace = self._trace.get()
        return [] if trace is None else list(trace.spans)

    def _store_span(self, fields: SpanCoreFields) -> None:
        trace = self._trace.get()
        if trace is None or not trace.is_open:
            ended = (
                "no rollout" if trace is None else f"rollout {trace.rollout_id}, which has ended"
            )
            raise RuntimeError(
                f"span {fields.name!r} was emitted in the context of {ended}: emit in the task of "
                "the rollout, in tasks created by it, or in asyncio.to_thread (a plain "
                "threading.Thread does not inherit the context)"
            )
        if self._thread is None:
            raise RuntimeError(f"span {fields.name!r}: call init_worker before agents emit spans")
        what = f"storing span {fields.name!r} of rollout {trace.rollout_id}"
        stored = self._thread.run(self._add(trace, fields), what=what, limit=store_answer_limit())
        trace.spans.append(stored)

    async def _add(self, trace: _Trace, fields: SpanCoreFields) -> Span:
        if self._store is None:
            raise RuntimeError("RolloutTracer has no store: pass it to init_worker")
        sequence_id = await self._store.get_next_span_sequence_id(
            trace.rollout_id, trace.attempt_id
        )
        span = Span.from_core_fields(
            fields,
            rollout_id=trace.rollout_id,
            attempt_id=trace.attempt_id,
            sequence_id=sequence_id,
        )
        await self._store.add_span(span)
        return span
