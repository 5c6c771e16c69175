"""Why agents failed: told by runners to the store, where the daemon reads it."""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

from agentlightning.runner.agent import LitAgentRunner
from agentlightning.types import Hook

logger = logging.getLogger(__name__)

# In an attempt's metadata.
METADATA_KEY = "agl_fast.exception"
_LONGEST = 300


def tell_why_agents_fail() -> None:
    """Monkeypatch ``LitAgentRunner._step_impl`` of agentlightning 0.3.0.

    The runner logs an agent's exception in its own process and tells the store ``failed`` alone.
    Here the attempt's metadata get the exception before its status changes. Obsolete with a release
    of agentlightning whose store has the reason of a failed attempt. Runner processes are forked
    and inherit this; twice does no harm.
    """
    step = LitAgentRunner._step_impl
    if hasattr(step, "__wrapped__"):
        return

    @functools.wraps(step)
    async def step_that_tells(
        self: Any, next_rollout: Any, raise_on_exception: bool = False
    ) -> str:
        if not any(isinstance(hook, _TellException) for hook in self._hooks):
            self._hooks = [*self._hooks, _TellException()]
        try:
            # The exception is then at hand where hooks are called.
            return str(await step(self, next_rollout, raise_on_exception=True))
        except Exception as error:
            if raise_on_exception:
                raise
            logger.debug("rollout %r failed: %r", next_rollout.rollout_id, error)
            return str(next_rollout.rollout_id)

    LitAgentRunner._step_impl = step_that_tells


class _TellException(Hook):
    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any, spans: Any) -> None:
        error = sys.exc_info()[1]
        if error is None:
            return
        attempt = rollout.attempt
        metadata = {**(attempt.metadata or {}), METADATA_KEY: in_words(error)}
        await runner.get_store().update_attempt(
            rollout.rollout_id, attempt.attempt_id, metadata=metadata
        )


def in_words(error: BaseException) -> str:
    """The exception's type, its HTTP status if it has one, and its first line."""
    status = getattr(error, "status_code", None)
    name = type(error).__name__ + (f" (HTTP {status})" if isinstance(status, int) else "")
    message = next(iter(str(error).strip().splitlines()), "")
    return f"{name}: {message}"[:_LONGEST] if message else name
