"""verl's FSDP2 engines, registered for device `cpu` (verl registers them for CUDA and NPU)."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import (
    FSDPEngineWithLMHead,
    FSDPEngineWithValueHead,
)

BACKENDS = ["fsdp", "fsdp2"]


class _OnHost:
    engine_config: Any

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        if self.engine_config.strategy != "fsdp2":
            raise ValueError(
                f"strategy={self.engine_config.strategy!r}: FSDP1 needs an accelerator, "
                "on a CPU set strategy=fsdp2"
            )
        if not self.engine_config.forward_only:
            return super()._build_fsdp_module(module)  # type: ignore[misc, no-any-return]
        # A forward-only engine (the reference policy) would offload its parameters from the device
        # to pinned host memory. Here they are on the host already, and nothing can pin it.
        configured = self.engine_config
        self.engine_config = dataclasses.replace(configured, forward_only=False)
        try:
            built: nn.Module = super()._build_fsdp_module(module)  # type: ignore[misc]
        finally:
            self.engine_config = configured
        return built


@EngineRegistry.register(model_type="language_model", backend=BACKENDS, device="cpu")
class CpuLanguageModelEngine(_OnHost, FSDPEngineWithLMHead):
    """FSDP2 language model on the host."""


@EngineRegistry.register(model_type="value_model", backend=BACKENDS, device="cpu")
class CpuValueModelEngine(_OnHost, FSDPEngineWithValueHead):
    """FSDP2 value model on the host."""
