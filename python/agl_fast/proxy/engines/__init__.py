"""The inference engines behind the proxy: a module each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl_fast.proxy.engines.base import Engine, engine_named

if TYPE_CHECKING:  # modules have all names, with the right types
    from agl_fast.proxy.engines import vllm

    _ENGINES: tuple[Engine, ...] = (vllm,)

DEFAULT_ENGINE = "vllm"

__all__ = ["DEFAULT_ENGINE", "Engine", "engine_named"]
