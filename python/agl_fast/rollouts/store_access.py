"""Requests to Agent-lightning's store, with deadlines and retries."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import aiohttp
from agentlightning import LightningStore, LightningStoreClient

from agl_fast.verl.supervision.deadlines import Deadlines

T = TypeVar("T")

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
_AWAY = (ConnectionError, aiohttp.ClientConnectionError)


class StoreAccess:
    """A store with deadlines, and errors that name the failed request.

    Requests are sequential, also those of several batches: a store that blocks a thread while it
    waits would deadlock otherwise.
    Idempotent requests are retried while the store is unreachable.

    Raises:
        RuntimeError: the store raised an error, which is the cause, or was unreachable for longer
            than the deadline ``store_away``.
        TimeoutError: a request took longer than the deadline ``store_answer``.
    """

    def __init__(self, store: LightningStore, deadlines: Deadlines) -> None:
        self._store = store
        self._deadlines = deadlines
        self._is_away = False  # for longer than it may be
        self._turn = asyncio.Lock()

    async def add_resources(self, resources: dict[str, Any]) -> str:
        """The resources' id."""
        update = await self._ask("add resources", lambda: self._store.add_resources(resources))
        return str(update.resources_id)

    async def enqueue(self, requests: Sequence[Any]) -> list[Any]:
        return list(
            await self._ask("enqueue rollouts", lambda: self._store.enqueue_many_rollouts(requests))
        )

    async def finished(self, rollout_ids: list[str]) -> list[Any]:
        """The rollouts that have finished."""

        def ask() -> Any:
            return self._store.wait_for_rollouts(rollout_ids=rollout_ids, timeout=0)

        return list(await self._ask_again("list finished rollouts", ask))

    async def rollout(self, rollout_id: str) -> Any:
        """The rollout with its latest attempt as ``attempt``, if there is one.

        Raises:
            RuntimeError: the store does not know the rollout.
        """
        what = f"find rollout {rollout_id!r}"
        rollout = await self._ask_for_one(what, rollout_id, self._store.get_rollout_by_id)
        if rollout is None:
            raise RuntimeError(f"the store no longer knows rollout {rollout_id!r}")
        return rollout

    async def latest_attempt(self, rollout_id: str) -> Any | None:
        what = f"find the attempt of rollout {rollout_id!r}"
        return await self._ask_for_one(what, rollout_id, self._store.get_latest_attempt)

    async def _ask_for_one(
        self, what: str, rollout_id: str, ask: Callable[[str], Awaitable[Any]]
    ) -> Any:
        """Send a request, and accept the answer None only from a reachable store.

        Agent-lightning's client also returns None if it cannot reach the store.
        """

        async def ask_surely() -> Any:
            answer = await ask(rollout_id)
            if answer is None and isinstance(self._store, LightningStoreClient):
                await self._store.query_rollouts(rollout_id_in=[rollout_id], limit=1)  # or raises
                answer = await ask(rollout_id)
            return answer

        return await self._ask_again(what, ask_surely)

    async def spans(self, rollout_id: str, attempt_id: str) -> list[Any]:
        """The spans of an attempt, ordered by sequence number."""
        what = f"give the spans of rollout {rollout_id!r}"

        def ask() -> Any:
            return self._store.query_spans(rollout_id, attempt_id=attempt_id)

        spans = await self._ask_again(what, ask)
        return sorted(spans, key=lambda span: span.sequence_id)

    async def workers(self) -> list[Any]:
        """The runners that have sent a heartbeat, with their current rollouts."""
        try:
            return list(
                await self._ask_again("list the runners", lambda: self._store.query_workers())
            )
        except RuntimeError as error:
            if isinstance(error.__cause__, NotImplementedError):
                return []  # a user's store may not implement it
            raise

    async def give_up_attempt(self, rollout_id: str, attempt_id: str) -> None:
        """Mark an attempt as unresponsive; the store fails or retries the rollout."""
        what = f"give up an attempt at rollout {rollout_id!r}"

        def ask() -> Any:
            return self._store.update_attempt(rollout_id, attempt_id, status="unresponsive")

        await self._ask_again(what, ask)

    async def queue_again(self, rollout_id: str) -> None:
        what = f"queue rollout {rollout_id!r} again"

        def ask() -> Any:
            return self._store.update_rollout(rollout_id, status="requeuing")

        await self._ask_again(what, ask)

    async def cancel(self, rollout_id: str) -> None:
        """Cancel it; nothing where the store has been away for too long, which was raised."""
        if self._is_away:
            return
        what = f"cancel rollout {rollout_id!r}"

        def ask() -> Any:
            return self._store.update_rollout(rollout_id, status="cancelled")

        await self._ask_again(what, ask)

    async def _ask_again(self, what: str, ask: Callable[[], Awaitable[T]]) -> T:
        """Send an idempotent request, with retries while the store is unreachable."""
        limit = self._deadlines.store_away
        end = time.monotonic() + limit.seconds
        reported = False
        while True:
            try:
                return await self._ask(what, ask)
            except RuntimeError as error:
                if not isinstance(error.__cause__, _AWAY):
                    raise
                if time.monotonic() > end:
                    self._is_away = True
                    raise
                if not reported:
                    reported = True
                    logger.warning("%s; retrying for up to %s", error, limit)
            await asyncio.sleep(min(_RETRY_SECONDS, limit.seconds))

    async def _ask(self, what: str, ask: Callable[[], Awaitable[T]]) -> T:
        limit = self._deadlines.store_answer
        try:
            async with self._turn:
                answered = await asyncio.wait_for(ask(), limit.seconds)
        except asyncio.TimeoutError as error:  # not yet the builtin one in Python 3.10
            raise TimeoutError(f"the store took more than {limit} to {what}") from error
        except _AWAY as error:
            text = str(error) or repr(error)
            raise RuntimeError(f"the store failed to {what}: {text}") from error
        except Exception as error:
            raise RuntimeError(f"the store failed to {what}: {error!r}") from error
        self._is_away = False
        return answered
