"""Monkeypatches of Agent-lightning for the processes of runners: rewards, failures, spans.

Runner processes are forked and inherit them.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import agentlightning.emitter.reward  # noqa: F401, whose name in the package is a function
from agentlightning.runner.agent import LitAgentRunner
from agentlightning.types import Hook, Span
from agentlightning.utils.otlp import LightningStoreOTLPExporter
from agentops.sdk.exporters import AuthenticatedOTLPExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

from agl_fast.rows.rewards import read_reward

logger = logging.getLogger(__name__)

# Where an attempt's metadata hold the exception of its agent.
METADATA_KEY = "agl_fast.exception"
_MAX_SUMMARY_CHARACTERS = 300
_SCALARS = (str, bool, int, float)


def patch_agentlightning() -> None:
    """Install all patches of this module. Repeated calls have no effect."""
    _accept_returned_rewards()
    _accept_emitted_rewards()
    _report_agent_exceptions()
    _set_endpoint_of_client()
    _export_without_agentops_headers()
    _drop_unsupported_attributes()


def _patch(owner: Any, name: str, replacement_of: Callable[[Any], Any]) -> None:
    """Replace a method by one made of the original, once."""
    original = getattr(owner, name)
    if not hasattr(original, "__wrapped__"):
        setattr(owner, name, functools.wraps(original)(replacement_of(original)))


# --- rewards


def _accept_returned_rewards() -> None:
    """Monkeypatch ``LitAgentRunner._post_process_rollout_result`` of agentlightning 0.3.0.

    It accepts only float, int and bool, so that a rollout fails if its agent returns a number of
    numpy or torch; and it accepts infinity, which is no reward. Obsolete with a release of
    agentlightning that accepts real numbers.
    """

    def replacement_of(process: Any) -> Any:
        async def process_with_number(self: Any, rollout: Any, raw_result: Any) -> Any:
            if not isinstance(raw_result, list):
                where = f"rollout {rollout.rollout_id!r}: the reward that its agent returned"
                raw_result = read_reward(raw_result, where)  # None if it is NaN
            return await process(self, rollout, raw_result)

        return process_with_number

    _patch(LitAgentRunner, "_post_process_rollout_result", replacement_of)


def _accept_emitted_rewards() -> None:
    """Monkeypatch ``emit_reward`` of agentlightning 0.3.0 in every module that has it.

    Reason and obsolescence as for returned rewards.
    """
    emit = sys.modules["agentlightning.emitter.reward"].emit_reward
    if hasattr(emit, "__wrapped__"):
        return

    @functools.wraps(emit)
    def emit_number(reward: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(reward, Mapping):
            reward = {name: _finite(each, f"reward {name!r}") for name, each in reward.items()}
        else:
            reward = _finite(reward, "the emitted reward")
        return emit(reward, *arguments, **options)

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "agentlightning" and vars(module).get("emit_reward") is emit:
            setattr(module, "emit_reward", emit_number)  # noqa: B010


def _finite(value: Any, where: str) -> float:
    """The reward as Python's float.

    Raises:
        TypeError: it is no real number. ValueError: it is not finite in float32.
    """
    number = read_reward(value, where)
    if number is None:
        raise ValueError(f"{where} is {value!r}; rewards must be finite: emit none instead")
    return number


# --- failures


def _report_agent_exceptions() -> None:
    """Monkeypatch ``LitAgentRunner._step_impl`` of agentlightning 0.3.0.

    The runner logs an agent's exception in its own process and reports only ``failed`` to the
    store. The replacement first writes the exception into the attempt's metadata. Obsolete with a
    release of agentlightning whose store has the reason of a failed attempt.
    """

    def replacement_of(step: Any) -> Any:
        async def step_with_report(
            self: Any, next_rollout: Any, raise_on_exception: bool = False
        ) -> str:
            if not any(isinstance(hook, _ReportException) for hook in self._hooks):
                self._hooks = [*self._hooks, _ReportException()]
            try:
                # So that the exception is current when hooks are called.
                return str(await step(self, next_rollout, raise_on_exception=True))
            except Exception as error:
                if raise_on_exception:
                    raise
                logger.debug("rollout %r failed: %r", next_rollout.rollout_id, error)
                return str(next_rollout.rollout_id)

        return step_with_report

    _patch(LitAgentRunner, "_step_impl", replacement_of)


class _ReportException(Hook):
    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any, spans: Any) -> None:
        error = sys.exc_info()[1]
        if error is None:
            return
        attempt = rollout.attempt
        metadata = {**(attempt.metadata or {}), METADATA_KEY: summarize(error)}
        await runner.get_store().update_attempt(
            rollout.rollout_id, attempt.attempt_id, metadata=metadata
        )


def summarize(error: BaseException) -> str:
    """The exception's type, its HTTP status if it has one, and its first line."""
    status = getattr(error, "status_code", None)
    name = type(error).__name__ + (f" (HTTP {status})" if isinstance(status, int) else "")
    message = next(iter(str(error).strip().splitlines()), "")
    return f"{name}: {message}"[:_MAX_SUMMARY_CHARACTERS] if message else name


# --- spans


def _set_endpoint_of_client() -> None:
    """Monkeypatch ``LightningStoreOTLPExporter.enable_store_otlp`` of agentlightning 0.3.0.

    It sets the exporter's ``_endpoint``, which OpenTelemetry (seen with 1.45.2) reads only when the
    exporter is made: every span goes to localhost:4318, is tried for seven seconds while the agent
    waits, and is lost. Obsolete with a release of agentlightning that sets the endpoint of the
    exporter's client.
    """

    def replacement_of(enable: Any) -> Any:
        def enable_store_otlp(self: Any, endpoint: str, rollout_id: str, attempt_id: str) -> None:
            enable(self, endpoint, rollout_id, attempt_id)
            client = getattr(self, "_client", None)
            if client is not None and hasattr(client, "_endpoint"):
                client._endpoint = endpoint

        return enable_store_otlp

    _patch(LightningStoreOTLPExporter, "enable_store_otlp", replacement_of)


def _export_without_agentops_headers() -> None:
    """Monkeypatch ``AuthenticatedOTLPExporter.export`` of agentops 0.4.21.

    Agent-lightning's default tracer exports with it, also to the store. It reads ``_headers`` and
    ``_session``, which OpenTelemetry's exporter (seen with 1.45.2) no longer has, and every span is
    lost. The store accepts spans without a token of AgentOps. Obsolete with a release of agentops
    that works with OpenTelemetry 1.45.
    """

    def replacement_of(export: Any) -> Any:
        def export_with_or_without_headers(self: Any, spans: Sequence[Any]) -> Any:
            if hasattr(self, "_headers"):
                return export(self, spans)
            return OTLPSpanExporter.export(self, spans)

        return export_with_or_without_headers

    _patch(AuthenticatedOTLPExporter, "export", replacement_of)


def _drop_unsupported_attributes() -> None:
    """Monkeypatch ``Span.__init__`` of agentlightning 0.3.0.

    It refuses attributes that are None, bytes, mappings or mixed sequences. OpenTelemetry used to
    drop them and (seen with 1.45.2) no longer does, so that a call of openai with
    ``max_tokens=None``, as frameworks make it, fails in the agent when AgentOps ends its span.
    Obsolete with a release of agentlightning that accepts what OpenTelemetry 1.45 does.
    """

    def replacement_of(make: Any) -> Any:
        def make_of_plain_attributes(self: Any, /, **fields: Any) -> None:
            attributes = fields.get("attributes") or {}
            fields["attributes"] = {
                name: value for name, value in attributes.items() if _is_plain(value)
            }
            make(self, **fields)

        return make_of_plain_attributes

    _patch(Span, "__init__", replacement_of)


def _is_plain(value: Any) -> bool:
    if isinstance(value, _SCALARS):
        return True
    if not isinstance(value, list | tuple):
        return False
    kinds = {type(each) for each in value}
    return kinds <= {int, float} or (len(kinds) == 1 and kinds < set(_SCALARS))
