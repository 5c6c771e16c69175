"""Heartbeats of several worker ids from one thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import aiohttp
from agentlightning.store.base import LightningStore
from agentlightning.utils.system_snapshot import system_snapshot

from agl_fast.verl.store_sessions import close_session

logger = logging.getLogger(__name__)


@contextmanager
def heartbeats(
    store: LightningStore, worker_ids: Callable[[], Sequence[str]], seconds: float
) -> Iterator[None]:
    """Send a heartbeat of each worker to the store every `seconds`, until the block ends.

    A thread sends them, so an agent that blocks the event loop does not look dead.
    """
    stop = threading.Event()
    thread = threading.Thread(
        target=lambda: asyncio.run(_beat(store, worker_ids, seconds, stop)),
        name="agl_fast-heartbeats",
        daemon=True,
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(seconds)


async def _beat(
    store: LightningStore,
    worker_ids: Callable[[], Sequence[str]],
    seconds: float,
    stop: threading.Event,
) -> None:
    while not stop.is_set():
        snapshot = system_snapshot()
        for worker_id in worker_ids():
            try:
                await asyncio.wait_for(store.update_worker(worker_id, snapshot), seconds)
            except (ConnectionError, aiohttp.ClientError, asyncio.TimeoutError) as error:
                logger.warning("The store took no heartbeat of %s: %r", worker_id, error)
        stop.wait(seconds)
    await close_session(store)
