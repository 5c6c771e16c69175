"""Spans of runners in other processes, on their way to the store."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from agentlightning.types import Span
from agentlightning.utils.otlp import LightningStoreOTLPExporter
from agentops.sdk.exporters import AuthenticatedOTLPExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

from agl_fast.verl.agent_rewards import take_real_numbers_as_rewards
from agl_fast.verl.failure_reasons import tell_why_agents_fail


def send_spans_to_the_store() -> None:
    """Make emitted rewards and traced calls arrive with Agent-lightning's tracers.

    Runner processes are forked and inherit this; twice does no harm.
    """
    take_real_numbers_as_rewards()
    tell_why_agents_fail()
    _set_endpoint_of_client()
    _export_without_agentops_headers()
    _leave_out_attributes_that_spans_do_not_take()


def _set_endpoint_of_client() -> None:
    """Monkeypatch ``LightningStoreOTLPExporter.enable_store_otlp`` of agentlightning 0.3.0.

    It sets the exporter's ``_endpoint``, which OpenTelemetry (seen with 1.45.2) reads only when the
    exporter is made: every span goes to localhost:4318, is tried for seven seconds while the agent
    waits, and is lost. Obsolete with a release of agentlightning that sets the endpoint of the
    exporter's client.
    """
    enable = LightningStoreOTLPExporter.enable_store_otlp
    if hasattr(enable, "__wrapped__"):
        return

    @functools.wraps(enable)
    def enable_store_otlp(self: Any, endpoint: str, rollout_id: str, attempt_id: str) -> None:
        enable(self, endpoint, rollout_id, attempt_id)
        client = getattr(self, "_client", None)
        if client is not None and hasattr(client, "_endpoint"):
            client._endpoint = endpoint

    LightningStoreOTLPExporter.enable_store_otlp = enable_store_otlp


def _export_without_agentops_headers() -> None:
    """Monkeypatch ``AuthenticatedOTLPExporter.export`` of agentops 0.4.21.

    It is what Agent-lightning's default tracer exports with, to the store as well. It reads
    ``_headers`` and ``_session``, which OpenTelemetry's exporter (seen with 1.45.2) no longer has,
    and every span is lost. The store takes spans without a token of AgentOps. Obsolete with a
    release of agentops that works with OpenTelemetry 1.45.
    """
    export = AuthenticatedOTLPExporter.export
    if hasattr(export, "__wrapped__"):
        return

    @functools.wraps(export)
    def export_as_it_can(self: Any, spans: Sequence[Any]) -> Any:
        if hasattr(self, "_headers"):
            return export(self, spans)
        return OTLPSpanExporter.export(self, spans)

    AuthenticatedOTLPExporter.export = export_as_it_can


def _leave_out_attributes_that_spans_do_not_take() -> None:
    """Monkeypatch ``Span.__init__`` of agentlightning 0.3.0.

    It refuses attributes that are None, bytes, mappings or mixed sequences. OpenTelemetry used to
    leave them out and (seen with 1.45.2) no longer does, so that a call of openai with
    ``max_tokens=None``, as frameworks make it, fails in the agent when AgentOps ends its span.
    Obsolete with a release of agentlightning that takes what OpenTelemetry 1.45 does.
    """
    make = Span.__init__
    if hasattr(make, "__wrapped__"):
        return

    @functools.wraps(make)
    def make_of_plain_attributes(self: Any, /, **fields: Any) -> None:
        attributes = fields.get("attributes") or {}
        fields["attributes"] = {
            name: value for name, value in attributes.items() if _is_plain(value)
        }
        make(self, **fields)

    Span.__init__ = make_of_plain_attributes


_SCALARS = (str, bool, int, float)


def _is_plain(value: Any) -> bool:
    if isinstance(value, _SCALARS):
        return True
    if not isinstance(value, list | tuple):
        return False
    kinds = {type(each) for each in value}
    return kinds <= {int, float} or (len(kinds) == 1 and kinds < set(_SCALARS))
