"""A run's store gives the run's rollouts to the runners of the run, and to no others."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from agentlightning import LightningStore
from agentlightning.types import Worker

from agl_fast.verl.membership.identity import ROLLOUT_KEY, RunIdentity

logger = logging.getLogger(__name__)

# What another run's runner gets: no work, and no error that it would repeat in its log.
_ANSWERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "dequeue_rollout": lambda _: None,
    "dequeue_many_rollouts": lambda _: [],
    "update_worker": lambda arguments: Worker(worker_id=arguments["worker_id"]),
}
_GUARDED = (*_ANSWERS, "start_attempt")
_DEQUEUES = ("dequeue_rollout", "dequeue_many_rollouts")


class Guard:
    """Refuses work to runners that are not of the run, and cancels rollouts that are not.

    A store that outlives its runs still has the rollouts of a driver that was killed. It replaces
    methods of the store object between `install` and `remove`.

    Attributes:
        refused: worker names of other runners that asked.
    """

    def __init__(self, store: LightningStore, run: RunIdentity) -> None:
        self.refused: set[str] = set()
        self._store: Any = store
        self._run = run
        self._before: dict[str, Any] = {}

    def install(self) -> None:
        own = vars(self._store)
        self._before = {name: own[name] for name in (*_GUARDED, "statistics") if name in own}
        for name in _GUARDED:
            setattr(self._store, name, self._for_members(name, getattr(self._store, name)))
        statistics = self._store.statistics

        async def with_identity() -> Any:
            return {**await statistics(), **self._run.statistics()}

        self._store.statistics = with_identity

    def remove(self) -> None:
        for name in (*_GUARDED, "statistics"):
            delattr(self._store, name)
        for name, value in self._before.items():
            setattr(self._store, name, value)

    def _for_members(
        self, name: str, method: Callable[..., Awaitable[Any]]
    ) -> Callable[..., Awaitable[Any]]:
        signature = inspect.signature(method)

        @functools.wraps(method)  # the runner's names are bound to its signature
        async def call(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            worker_id = arguments.get("worker_id")
            if self._run.owns(worker_id):
                if name in _DEQUEUES:
                    return await self._own(method, *args, **kwargs)
                return await method(*args, **kwargs)
            self._warn_once(worker_id)
            if name in _ANSWERS:
                return _ANSWERS[name](arguments)
            raise PermissionError(f"runner {worker_id!r} is not of {self._run}")

        return call

    async def _own(self, dequeue: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
        """The next of the run's rollouts, as one or several."""
        while True:
            found = await dequeue(*args, **kwargs)
            if not found:
                return found
            foreign = [
                rollout
                for rollout in (found if isinstance(found, Sequence) else [found])
                if (rollout.metadata or {}).get(ROLLOUT_KEY, self._run.run_id) != self._run.run_id
            ]
            for rollout in foreign:
                logger.warning(
                    "Rollout %s in the store is of another run, %s: it is cancelled.",
                    rollout.rollout_id,
                    rollout.metadata[ROLLOUT_KEY],
                )
                await self._store.update_rollout(rollout.rollout_id, status="cancelled")
            if not foreign:
                return found
            if isinstance(found, Sequence) and len(foreign) < len(found):
                return [rollout for rollout in found if rollout not in foreign]

    def _warn_once(self, worker_id: str | None) -> None:
        name = worker_id or "without a name"
        if name in self.refused:
            return
        self.refused.add(name)
        logger.warning(
            "Runner %r asks this run's store for work but is not of %s: it gets none. A run works "
            "with the runners that its own program started; others join it with "
            "`python -m agl_fast join --run %s`.",
            name,
            self._run,
            self._run.run_id,
        )
