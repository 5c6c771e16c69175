"""The gate between the proxy and the servers, closed while the servers' weights change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from agl_fast.proxy.flights import Flight, HeldError

# Between two looks whether the servers have answered.
_LOOK_SECONDS = 0.005


class Gate:
    """Lets requests to the servers pass, or holds them. Lives in the proxy's event loop."""

    def __init__(self) -> None:
        self._opened: asyncio.Event | None = None  # None: it is open
        self._under_way: set[Flight] = set()

    @property
    def is_held(self) -> bool:
        return self._opened is not None

    async def hold(self, drain_seconds: float) -> None:
        """Close the gate; return when no server works on a request.

        Requests under way may finish for ``drain_seconds``. Then the others are aborted at their
        servers, and wait at the gate to be repeated, except those of whose answer the agent has a
        part: they finish.
        """
        if self._opened is None:
            self._opened = asyncio.Event()
        end = time.monotonic() + drain_seconds
        while waited_for := [each for each in self._under_way if not each.is_read]:
            if time.monotonic() >= end:
                for flight in waited_for:
                    if flight.is_repeatable:
                        flight.interrupt(HeldError())
            await asyncio.sleep(_LOOK_SECONDS)

    def release(self) -> None:
        """Open the gate."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.set()

    async def wait(self, flight: Flight) -> bool:
        """Wait while the gate is closed.

        Returns:
            Whether it was closed. The request's time limit starts again then.
        """
        if self._opened is None:
            return False
        flight.leaves_server()
        while self._opened is not None:
            with flight.waiting():
                await self._opened.wait()
        return True

    @contextmanager
    def asking(self, flight: Flight) -> Iterator[None]:
        """The block asks a server; begin it without an await after ``wait``."""
        self._under_way.add(flight)
        try:
            yield
        finally:
            self._under_way.discard(flight)
            flight.goes_on()
