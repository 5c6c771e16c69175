"""Servers that accept requests and never answer."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

import aiohttp

from agl_fast.proxy.fleet import Fleet, Server
from agl_fast.proxy.flights import Flights, SilentServerError
from agl_fast.proxy.recorder import Recorder

LOOK_SECONDS = 2.0
# A server that has answered nothing for so long, while it has requests, is asked for its health.
QUIET_SECONDS = 5.0
ANSWER_SECONDS = 5.0
# A busy machine may miss one.
MISSES_IN_A_ROW = 2


class HealthMonitor:
    """Takes servers whose health check fails out of rotation, and brings them back.

    Only servers that are suspicious are asked: an answer to an agent shows as well that one works.

    Args:
        fleet: the fleet of now.
        flights: the requests under way.
        silent_seconds: requests to a server whose health check has failed for so long move to
            another one, where one is in rotation; those whose answer has begun are cut off.
        path: of the health check. A status of 500 and more means that it failed; a server may not
            know the path.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        fleet: Callable[[], Fleet],
        flights: Flights,
        recorder: Recorder,
        silent_seconds: float,
        path: str,
    ) -> None:
        self._session = session
        self._fleet = fleet
        self._flights = flights
        self._recorder = recorder
        self._silent_seconds = silent_seconds
        self._path = path
        self._misses: Counter[Server] = Counter()
        self._silent_since: dict[Server, float] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Ask every suspicious server at once."""
        fleet, now = self._fleet(), time.monotonic()
        suspicious = {each for each in fleet.servers if each.is_doubted or each.is_silent}
        for flight in self._flights:
            server = flight.server
            if server is not None and now - max(flight.sent_at, server.answered_at) > QUIET_SECONDS:
                suspicious.add(server)
        await asyncio.gather(*(self._ask(fleet, each) for each in suspicious))

    async def _ask(self, fleet: Fleet, server: Server) -> None:
        asked_at = time.monotonic()
        try:
            async with self._session.get(
                f"{server.url}{self._path}", timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS)
            ) as answer:
                why = f"{self._path} says {answer.status}" if answer.status >= 500 else ""
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            why = f"{self._path} does not answer: {error!r}"
        if not why:
            del self._misses[server]
            self._silent_since.pop(server, None)
            fleet.recovered(server)
            return
        server.is_doubted = True
        self._misses[server] += 1
        since = self._silent_since.setdefault(server, asked_at)
        if self._misses[server] < MISSES_IN_A_ROW:
            return
        self._recorder.count("servers_out", fleet.fell_silent(server, why))
        if time.monotonic() - since >= self._silent_seconds:
            self._move_requests(fleet, server)

    def _move_requests(self, fleet: Fleet, server: Server) -> None:
        if not any(each.is_in_rotation for each in fleet.servers):
            return  # it may be slow, and there is nowhere to go
        for flight in self._flights:
            if flight.server is server:
                flight.interrupt(
                    SilentServerError(
                        f"{server.url} has not answered for {self._silent_seconds:g} s"
                    )
                )
