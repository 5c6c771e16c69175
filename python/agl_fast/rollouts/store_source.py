"""Rollouts of mode v1: statuses, rewards and spans from the store, calls from the recorder."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from agentlightning import LightningStore
from agentlightning.adapter.triplet import (
    LlmProxyTraceToTriplet,
    TracerTraceToTriplet,
    TraceToTripletBase,
)
from agentlightning.emitter.reward import get_reward_value

from agl_fast.proxy import RecordedCall
from agl_fast.proxy.llm_proxy import LLMProxy
from agl_fast.rollouts.finished import SUCCEEDED, FinishedRollout
from agl_fast.rollouts.progress import DEADLINE, RolloutEnd
from agl_fast.rollouts.store_access import StoreAccess
from agl_fast.verl.agentlightning_patches import METADATA_KEY
from agl_fast.verl.membership import RunIdentity, current_run
from agl_fast.verl.supervision.deadlines import Deadlines

logger = logging.getLogger(__name__)


class CallFilter:
    """Mark calls as not trainable if no triplet of an adapter has their response id."""

    def __init__(self, adapter: TraceToTripletBase) -> None:
        self._adapter = adapter

    @classmethod
    def of(cls, adapter: Any) -> CallFilter | None:
        """The filter of an adapter; None if the adapter selects every call.

        Every call: no adapter, Agent-lightning's default, and the one for spans of its own proxy.

        Raises:
            TypeError: the adapter is no TraceToTripletBase.
        """
        if adapter is None or type(adapter) is LlmProxyTraceToTriplet:
            return None
        if not isinstance(adapter, TraceToTripletBase):
            raise TypeError(
                f"adapter is a {type(adapter).__name__}: expected a TraceToTripletBase, whose "
                "triplets carry the response ids of the calls to train on"
            )
        if type(adapter) is TracerTraceToTriplet and _is_default(adapter):
            return None
        return cls(adapter)

    def apply(self, rollout_id: str, spans: Sequence[Any], calls: Sequence[RecordedCall]) -> None:
        """Set ``trainable`` of the calls.

        Raises:
            ValueError: the rollout has calls, and the triplets match none of them.
        """
        if not calls:
            return
        triplets = self._adapter.adapt(spans) if spans else []
        matched = {(triplet.metadata or {}).get("response_id") for triplet in triplets}
        kept = [each.response_id in matched for each in calls]
        if not any(kept):
            raise ValueError(
                f"rollout {rollout_id!r}: {type(self._adapter).__name__} matches none of its "
                f"{len(calls)} calls. It made {len(triplets)} triplets of {len(spans)} spans, with "
                f"the response ids {sorted(map(str, matched))[:3]}; the calls' begin with "
                f"{[each.response_id for each in calls[:3]]}. Does the tracer record the agent's "
                "calls, and does agent_match fit?"
            )
        for each, keep in zip(calls, kept, strict=True):
            each.call.trainable = each.call.trainable and keep


def _is_default(adapter: TracerTraceToTriplet) -> bool:
    default = TracerTraceToTriplet()
    return bool(adapter.agent_match is None and adapter.llm_call_match == default.llm_call_match)


def assign_rewards(spans: Sequence[Any], calls: Sequence[RecordedCall]) -> float | None:
    """Assign each reward to the last call finished before it; a later reward replaces it.

    Args:
        spans: the attempt's spans, ordered by sequence number.
        calls: the attempt's calls, in the same order; sets their ``reward``.

    Returns:
        The attempt's last reward, also if no call precedes it; None without rewards. NaN is
        missing.
    """
    final = None
    for span in spans:
        reward = get_reward_value(span)
        if reward is None or math.isnan(reward):
            continue
        final = float(reward)
        before = [each.call for each in calls if each.sequence < span.sequence_id]
        if before:
            before[-1].reward = final
    return final


class StoreSource(StoreAccess):
    """Agent-lightning's store and the proxy's recorder."""

    def __init__(
        self,
        store: LightningStore,
        llm_proxy: LLMProxy,
        call_filter: CallFilter | None,
        deadlines: Deadlines,
    ) -> None:
        super().__init__(store, deadlines)
        self._llm_proxy = llm_proxy
        self._call_filter = call_filter
        self._named: set[str | None] = set()

    def start(self) -> None:
        self._turn = asyncio.Lock()  # of the daemon's new event loop

    def stop(self) -> None: ...

    async def set_up(self, model: str, temperature: float, policy_version: int) -> str:
        main_llm = self._llm_proxy.as_resource(
            model=model, sampling_parameters={"temperature": temperature}
        )
        return await self.add_resources({"main_llm": main_llm})

    def last_call_at(self, rollout_id: str, attempt_id: str) -> float:
        return self._llm_proxy.recorder.last_call_at(rollout_id, attempt_id)

    async def give_up(self, rollout_id: str) -> None:
        """Cancel a rollout, abort its requests and forget its calls."""
        await self.cancel(rollout_id)
        await self._llm_proxy.abort(rollout_id)
        self._llm_proxy.recorder.discard(rollout_id)

    async def give_up_attempt(self, rollout_id: str, attempt_id: str) -> None:
        """Give up an attempt in the store and abort its requests."""
        await super().give_up_attempt(rollout_id, attempt_id)
        await self._llm_proxy.abort(rollout_id, attempt_id)

    async def finished_rollout(
        self, end: RolloutEnd, sample: Mapping[str, Any]
    ) -> FinishedRollout | None:
        rollout_id, data_id = end.rollout_id, sample["data_id"]
        # Nobody reads the answers of calls in flight.
        await self._llm_proxy.abort(rollout_id)
        attempt = await self.latest_attempt(rollout_id)
        if attempt is None:  # cancelled before an attempt started
            return FinishedRollout(rollout_id, data_id, [], None, end.status, sample)
        recorder = self._llm_proxy.recorder
        run = current_run()
        has_run = end.status not in (DEADLINE, "cancelled")
        if run is not None and has_run and not run.owns(attempt.worker_id):
            # A store in another process gives work to runners of any run. Keep the calls until the
            # rollout ends: after a discard the recorder accepts no more.
            self._warn_foreign(attempt.worker_id, run)
            await self.queue_again(rollout_id)
            return None
        calls = recorder.take(rollout_id, attempt.attempt_id)
        recorder.discard(rollout_id)
        spans = await self.spans(rollout_id, attempt.attempt_id)
        reward = assign_rewards(spans, calls)
        # An adapter needs the complete trace.
        if self._call_filter is not None and end.status == SUCCEEDED:
            self._call_filter.apply(rollout_id, spans, calls)
        # The attempt's status is more precise than "failed": timeout or unresponsive.
        status = attempt.status if end.status == "failed" else end.status
        return FinishedRollout(
            rollout_id,
            data_id,
            [recorded.call for recorded in calls],
            reward,
            status,
            sample,
            discarded_attempts=attempt.sequence_id - 1,
            queue_seconds=attempt.start_time - end.queued_at,
            seconds=end.ended_at - attempt.start_time,
            call_seconds=sum(each.finished_at - each.started_at for each in calls),
            error=None if status == SUCCEEDED else (attempt.metadata or {}).get(METADATA_KEY),
        )

    def _warn_foreign(self, worker_id: str | None, run: RunIdentity) -> None:
        if worker_id in self._named:
            return
        self._named.add(worker_id)
        logger.warning(
            "Runner %r took rollouts of %s and is not of it: what it did is not trained, and the "
            "rollouts are queued again. One store can serve one run at a time.",
            worker_id,
            run,
        )
