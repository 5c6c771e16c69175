"""Where rollouts are enqueued, and where what became of them is found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agentlightning import LightningStore

from agl_fast.proxy.llm_proxy import LOOPBACK, LLMProxy
from agl_fast.rollouts.call_filter import CallFilter
from agl_fast.rollouts.finished import Outcome
from agl_fast.rollouts.legacy_server import LegacyServer
from agl_fast.rollouts.legacy_source import LegacySource
from agl_fast.rollouts.progress import Finished, RolloutSource
from agl_fast.rollouts.store_source import StoreSource
from agl_fast.verl.supervision.deadlines import Deadlines


class Source(RolloutSource, Protocol):
    """Of one daemon, for one batch of samples after another."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    # The id of the resources under which agents find the model.
    async def set_up(self, model: str, temperature: float, policy_version: int) -> str: ...

    async def enqueue(self, requests: Sequence[Any]) -> list[Any]: ...

    # None: another run's runner has done it, and it is queued again.
    async def outcome(self, finished: Finished, sample: Mapping[str, Any]) -> Outcome | None: ...

    async def give_up(self, rollout_id: str) -> None: ...


def source_of(
    store: LightningStore | None,
    adapter: Any,
    llm_proxy: LLMProxy,
    deadlines: Deadlines,
    legacy: tuple[str | None, int | None, float],
) -> Source:
    """The store; where there is none, mode v0's server.

    Args:
        deadlines: of the store.
        legacy: host and port of mode v0's server, and the seconds after which it gives a task to
            another client.

    Raises:
        TypeError: the adapter is no TraceToTripletBase.
    """
    if store is not None:
        return StoreSource(store, llm_proxy, CallFilter.of(adapter), deadlines)
    host, port, task_timeout_seconds = legacy
    assert port is not None
    return LegacySource(LegacyServer(host or LOOPBACK, port, task_timeout_seconds), llm_proxy)
