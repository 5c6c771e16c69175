"""A store behind HTTP, as runners in other processes have it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from agl_fast.verl.supervision.waits import Limit
from support.daemon_runs import LoopThread, agentlightning


class StoreServer:
    """Serves a store on one port, between ``start`` and ``stop``, as often as one likes."""

    def __init__(self, store: Any) -> None:
        self.store = store
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]
        self._server: Any = None
        self._loop = LoopThread("store-server")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._server = agentlightning.LightningStoreServer(self.store, "127.0.0.1", self.port)
        self._loop.run(self._server.start(), what="starting the store", limit=Limit(30))

    def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            self._loop.run(server.stop(), what="stopping the store", limit=Limit(30))

    def close(self) -> None:
        self.stop()
        self._loop.stop()


@contextmanager
def served(store: Any) -> Iterator[StoreServer]:
    server = StoreServer(store)
    server.start()
    try:
        yield server
    finally:
        server.close()


@contextmanager
def client_of(server: StoreServer) -> Iterator[Any]:
    client = agentlightning.LightningStoreClient(server.url)
    try:
        yield client
    finally:
        asyncio.run(client.close())
