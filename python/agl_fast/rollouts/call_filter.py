"""Which calls a configured adapter lets through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentlightning.adapter.triplet import (
    LlmProxyTraceToTriplet,
    TracerTraceToTriplet,
    TraceToTripletBase,
)

from agl_fast.proxy import RecordedCall


class CallFilter:
    """Marks the calls whose response ids an adapter's triplets do not have as not trainable."""

    def __init__(self, adapter: TraceToTripletBase) -> None:
        self._adapter = adapter

    @classmethod
    def of(cls, adapter: Any) -> CallFilter | None:
        """The filter, or None for an adapter that means every call: none at all, Agent-lightning's
        default, and the one that reads the spans of its own proxy.

        Raises:
            TypeError: it is no TraceToTripletBase.
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
