"""A run's store hands work to the runners of the run alone."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from agentlightning import LightningStore
from agentlightning.types import Worker

from agl_fast.verl.membership.identity import RunIdentity

logger = logging.getLogger(__name__)

# What another run's runner gets: no work, and no error that it would repeat in its log.
_ANSWERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "dequeue_rollout": lambda _: None,
    "dequeue_many_rollouts": lambda _: [],
    "update_worker": lambda arguments: Worker(worker_id=arguments["worker_id"]),
}
_GUARDED = (*_ANSWERS, "start_attempt")


class Guard:
    """Refuses work to runners that are not of the run.

    It replaces methods of the store object between `install` and `remove`.

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

        async def call(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            worker_id = arguments.get("worker_id")
            if self._run.owns(worker_id):
                return await method(*args, **kwargs)
            self._warn_once(worker_id)
            if name in _ANSWERS:
                return _ANSWERS[name](arguments)
            raise PermissionError(f"runner {worker_id!r} is not of {self._run}")

        return call

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
