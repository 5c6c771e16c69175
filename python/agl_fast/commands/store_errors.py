"""Runners whose store has gone log a traceback for every try; `join` says it once instead."""

from __future__ import annotations

import logging

# Of Agent-lightning 0.3: what asks the store without an agent's doing.
LOGGERS = (
    "agentlightning.runner.agent",
    "agentlightning.runner.base",
    "agentlightning.store.client",
    "agentlightning.tracer.otel",
    "agentlightning.trainer.trainer",
    "agentlightning.execution.client_server",
    "opentelemetry.sdk._shared_internal",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
)
# Messages about the agent itself: its own connections may fail, and users want to see where.
_OF_AGENTS = ("Exception during rollout", "Exception during on_", "hook")
# What the store's client says of every try, without the error itself.
_OF_TRIES = ("Server is not healthy", "dequeue_rollout failed with exception: Cannot connect")


def quiet_store_errors() -> None:
    """Drop log records about connections that the store does not take.

    Call it before runners are forked; they inherit it.
    """
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(each, _WithoutStoreErrors) for each in logger.filters):
            logger.addFilter(_WithoutStoreErrors())


class _WithoutStoreErrors(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if message.startswith(_OF_TRIES):
            return False
        error = record.exc_info[1] if record.exc_info else None
        is_of_agent = any(part in message for part in _OF_AGENTS)
        return is_of_agent or error is None or not is_lost_connection(error)


def is_lost_connection(error: BaseException) -> bool:
    """Whether the error, or what caused it, is a connection that was not made or broke."""
    import aiohttp

    kinds = (ConnectionError, TimeoutError, aiohttp.ClientConnectionError)
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        if isinstance(found, kinds):
            return True
        seen.add(id(found))
        found = found.__cause__ or found.__context__
    return False
