"""HTTP sessions of Agent-lightning's store client, which has one for each event loop."""

from __future__ import annotations

import asyncio
from typing import Any

from agentlightning import LightningStoreClient


async def close_session(store: Any) -> None:
    """Close the session of the running event loop; the next request opens another one.

    The client's own `close` cannot close sessions of other loops. What is left open when its loop
    has ended is reported by aiohttp ("Unclosed client session").

    Args:
        store: a `LightningStoreClient`; other stores have no session, and nothing is done.
    """
    if not isinstance(store, LightningStoreClient):
        return
    session = store._sessions.pop(id(asyncio.get_running_loop()), None)
    if session is not None:
        await session.close()


def close_sessions_of_heartbeats(store: Any) -> None:
    """Let the store object, used by a runner, close the session of each heartbeat after it.

    Agent-lightning 0.3's runners send heartbeats from an event loop of their own, which ends
    without closing its session. Call it on the runner's event loop.
    """
    update_worker, loop_of_runner = store.update_worker, asyncio.get_running_loop()

    async def update_worker_once(*args: Any, **kwargs: Any) -> Any:
        try:
            return await update_worker(*args, **kwargs)
        finally:
            if asyncio.get_running_loop() is not loop_of_runner:
                await close_session(store)

    store.update_worker = update_worker_once
