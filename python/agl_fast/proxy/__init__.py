"""An OpenAI-compatible server between agents and inference servers that keeps all token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agl_fast.proxy.recorder import RecordedCall, Recorder
from agl_fast.proxy.sampling import SamplingPolicy

if TYPE_CHECKING:
    from agl_fast.proxy.llm_proxy import LLMProxy

__all__ = ["LLMProxy", "RecordedCall", "Recorder", "SamplingPolicy"]


def __getattr__(name: str) -> Any:
    # Its base class takes many seconds to import, and the server itself does not need it.
    if name != "LLMProxy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agl_fast.proxy.llm_proxy import LLMProxy

    return LLMProxy
