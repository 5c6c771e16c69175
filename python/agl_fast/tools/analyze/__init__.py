"""Estimate costs and lost tokens of each level from recorded calls.

Needs neither verl nor Agent-lightning, except `agl_fast.tools.analyze.store`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agl_fast.rows.options import Limits
    from agl_fast.tools.analyze.analysis import Analysis, ModelAnalysis, analyze
    from agl_fast.tools.analyze.costs import Costs, Hardware
    from agl_fast.tools.analyze.layouts import Layout
    from agl_fast.tools.analyze.model_shape import ModelConfigError, ModelShape, read_model_shape
    from agl_fast.tools.analyze.report import as_json, as_text
    from agl_fast.tools.analyze.traces import Traces, read_traces

__all__ = [
    "Analysis",
    "Costs",
    "Hardware",
    "Layout",
    "Limits",
    "ModelAnalysis",
    "ModelConfigError",
    "ModelShape",
    "Traces",
    "analyze",
    "as_json",
    "as_text",
    "read_model_shape",
    "read_traces",
]

# Loaded on first use: parsing the command line needs no torch.
_HOMES = {
    "Analysis": "tools.analyze.analysis",
    "Costs": "tools.analyze.costs",
    "Hardware": "tools.analyze.costs",
    "Layout": "tools.analyze.layouts",
    "Limits": "rows.options",
    "ModelAnalysis": "tools.analyze.analysis",
    "ModelConfigError": "tools.analyze.model_shape",
    "ModelShape": "tools.analyze.model_shape",
    "Traces": "tools.analyze.traces",
    "analyze": "tools.analyze.analysis",
    "as_json": "tools.analyze.report",
    "as_text": "tools.analyze.report",
    "read_model_shape": "tools.analyze.model_shape",
    "read_traces": "tools.analyze.traces",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'agl_fast.tools.analyze' has no attribute {name!r}")
    value = getattr(import_module(f"agl_fast.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
