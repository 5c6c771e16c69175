"""The inference engines behind the proxy: a module each."""

from __future__ import annotations

from agl_fast.proxy.engines.base import Engine, engine_named

DEFAULT_ENGINE = "vllm"

__all__ = ["DEFAULT_ENGINE", "Engine", "engine_named"]
