"""What each level of rows would cost and lose, of calls that agents have made.

Needs neither verl nor Agent-lightning, but for `agl_fast.analysis.store`.
"""

from __future__ import annotations

from agl_fast.analysis.analysis import Analysis, ModelAnalysis, analyze
from agl_fast.analysis.costs import Costs, Hardware
from agl_fast.analysis.layouts import Layout
from agl_fast.analysis.limits import Limits
from agl_fast.analysis.model_shape import ModelConfigError, ModelShape, read_model_shape
from agl_fast.analysis.report import as_json, as_text
from agl_fast.analysis.traces import Traces, read_traces

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
