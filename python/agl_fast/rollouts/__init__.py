"""Rollouts: enqueued in Agent-lightning's store, recorded by the proxy, built into rows."""

from __future__ import annotations

# First: it keeps litellm, which agentlightning imports, silent and offline.
import agl_fast.proxy.llm_proxy  # noqa: F401  # isort: skip

from agl_fast.rollouts.daemon import AgentModeDaemon
from agl_fast.rollouts.finished import FinishedRollout, Outcome
from agl_fast.rollouts.validation import ValidatedRollout, validation_metrics
from agl_fast.verl.agentlightning_patches import patch_agentlightning

__all__ = [
    "AgentModeDaemon",
    "FinishedRollout",
    "Outcome",
    "ValidatedRollout",
    "validation_metrics",
]

patch_agentlightning()
