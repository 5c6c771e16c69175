"""Rollouts into Agent-lightning's store, their calls out of the proxy, rows for the trainer."""

from __future__ import annotations

import os

# Importing agentlightning imports litellm, which would look for a price list on the internet.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

from agl_fast.verl.daemon.agent_mode import AgentModeDaemon
from agl_fast.verl.daemon.outcomes import Outcome
from agl_fast.verl.daemon.validation import ValidatedRollout, validation_metrics
from agl_fast.verl.span_export import send_spans_to_the_store

__all__ = ["AgentModeDaemon", "Outcome", "ValidatedRollout", "validation_metrics"]

send_spans_to_the_store()
