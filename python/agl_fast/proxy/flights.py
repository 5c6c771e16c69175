"""Requests under way, and how one ends before its answer is complete."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from agl_fast.proxy.fleet import Server

# The longest that closing the connections of aborted requests takes.
ABORT_SECONDS = 5.0


class AbortedError(RuntimeError):
    """The request's rollout or attempt has ended; the message is for the agent."""


class HeldError(RuntimeError):
    """The request was aborted at its server before a weight sync; it is repeated afterwards."""


class SilentServerError(ConnectionError):
    """A server answers nothing any more, not even ``/health``."""

    breaks_connection = False


class Flight:
    """One request of an agent, from its arrival until it is answered.

    Attributes:
        rollout_id, attempt_id: "" where the request names none.
        server: the one that is asked now; None: none yet.
        sent_at: when it was asked, of ``time.monotonic``.
        is_sent: the request is on its way to that server.
        has_begun: that server has answered with its headers.
        is_read: that server's answer is complete.
        is_repeatable: no answer is recorded, and the agent has nothing of one.
    """

    def __init__(self, rollout_id: str, attempt_id: str) -> None:
        self.rollout_id = rollout_id
        self.attempt_id = attempt_id
        self.server: Server | None = None
        self.sent_at = 0.0
        self.is_sent = False
        self.has_begun = False
        self.is_read = False
        self.is_repeatable = True
        self._asked_at: float | None = None
        self._task = asyncio.current_task()
        self._waits = False
        self._error: Exception | None = None

    def goes_to(self, server: Server) -> None:
        self.server, self.sent_at = server, time.monotonic()
        self.is_sent = self.has_begun = self.is_read = False

    def leaves_server(self) -> None:
        """The request waits for none, and all of its time is left."""
        self.server, self._asked_at = None, None

    def goes_on(self) -> None:
        """A `HeldError` that came too late is not raised."""
        if isinstance(self._error, HeldError):
            self._error = None

    def seconds_left(self, seconds: float) -> float:
        """Of so many since the first server was asked; more than 0."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()
        return max(self._asked_at + seconds - time.monotonic(), 0.001)

    def interrupt(self, error: Exception) -> None:
        """Raise an error where the request waits for its server, now or the next time it does.

        An answer that is complete is still recorded. The first error counts, except that every
        other one replaces a `HeldError`.
        """
        earlier = self._error
        if earlier is None or isinstance(earlier, HeldError):
            self._error = error
            if earlier is None and self._waits and self._task is not None:
                self._task.cancel()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The block waits for the server: ``interrupt`` ends it."""
        self._raise_interrupt()
        self._waits = True
        try:
            yield
        except asyncio.CancelledError:
            if self._error is None:
                raise  # the agent left
            if sys.version_info >= (3, 11) and self._task is not None:
                self._task.uncancel()
            self._raise_interrupt()
        finally:
            self._waits = False

    def _raise_interrupt(self) -> None:
        error, self._error = self._error, None
        if error is not None and (self.is_repeatable or not isinstance(error, HeldError)):
            raise error


class Flights:
    """Every request under way. Used in the proxy's event loop."""

    def __init__(self) -> None:
        self._of_rollout: dict[str, set[Flight]] = defaultdict(set)

    @contextmanager
    def of(self, rollout_id: str, attempt_id: str) -> Iterator[Flight]:
        flight = Flight(rollout_id, attempt_id)
        self._of_rollout[rollout_id].add(flight)
        try:
            yield flight
        finally:
            flights = self._of_rollout[rollout_id]
            flights.discard(flight)
            if not flights:
                del self._of_rollout[rollout_id]

    def __iter__(self) -> Iterator[Flight]:
        return iter([flight for flights in self._of_rollout.values() for flight in flights])

    def of_rollout(self, rollout_id: str) -> list[Flight]:
        return list(self._of_rollout.get(rollout_id, ()))

    async def abort(self, flights: Collection[Flight], why: str) -> int:
        """End requests, and wait until their connections to the servers are closed.

        Returns:
            How many there were.
        """
        for flight in flights:
            flight.interrupt(AbortedError(why))
        end = time.monotonic() + ABORT_SECONDS
        while any(flight in self._of_rollout.get(flight.rollout_id, ()) for flight in flights):
            if time.monotonic() > end:
                break
            await asyncio.sleep(0.005)
        return len(flights)
