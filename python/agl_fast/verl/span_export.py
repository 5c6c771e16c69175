"""Spans of runners in other processes, on their way to the store."""

from __future__ import annotations

import functools
from typing import Any

from agentlightning.utils.otlp import LightningStoreOTLPExporter


def send_spans_to_the_store() -> None:
    """Make emitted rewards and traced calls arrive when runners are processes of their own.

    Monkeypatches ``LightningStoreOTLPExporter.enable_store_otlp`` of agentlightning 0.3.0. It sets
    the exporter's ``_endpoint``, which OpenTelemetry (seen with 1.45.2) reads only when the
    exporter is made: every span goes to localhost:4318, is tried for seven seconds while the agent
    waits, and is lost. Obsolete with a release of agentlightning that sets the endpoint of the
    exporter's client. Runner processes are forked and inherit this; twice does no harm.
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
