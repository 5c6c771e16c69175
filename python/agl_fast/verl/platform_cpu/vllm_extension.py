"""vLLM worker extension that lets verl write new weights into a CPU engine."""

from __future__ import annotations

from typing import Any

from torch import nn
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.model_executor.layers import utils as vllm_layers

from agl_fast.verl.platform_cpu.registration import require_cpu
from agl_fast.verl.supervision.load_errors import ReportsLoadErrors


def keep_linear_weights() -> None:
    """Make vLLM's CPU linear layers keep their weight beside the packed copy.

    Monkeypatch of `vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm` (vLLM 0.28.0).
    It packs a linear weight for the CPU kernel and, told so by `UnquantizedLinearMethod`, replaces
    the parameter by an empty one, so that a weight sync finds nothing to write to
    ("'Parameter' object has no attribute 'weight_loader'"). With the weight kept, a sync writes it
    and verl's `process_weights_after_loading` packs it anew. Obsolete with the first vLLM whose CPU
    layers can load weights after start-up (its own `reload_weights` samples stale ones in 0.28.0).
    """
    pack = vllm_layers.dispatch_cpu_unquantized_gemm
    if getattr(pack, "keeps_weight", False):
        return

    def pack_and_keep_weight(layer: nn.Module, remove_weight: bool) -> None:
        pack(layer, remove_weight=False)

    pack_and_keep_weight.keeps_weight = True  # type: ignore[attr-defined]
    vllm_layers.dispatch_cpu_unquantized_gemm = pack_and_keep_weight


class CpuWorkerExtension(ReportsLoadErrors, vLLMColocateWorkerExtension):
    """For `rollout.engine_kwargs.vllm.worker_extension_cls`."""

    model_runner: Any

    def __new__(cls, **kwargs: Any) -> CpuWorkerExtension:
        require_cpu()
        keep_linear_weights()
        worker: CpuWorkerExtension = super().__new__(cls, **kwargs)
        return worker

    def require_loadable_weights(self) -> None:
        """Raise RuntimeError naming the parameters that a weight sync could not write."""
        lost = [
            name
            for name, parameter in self.model_runner.model.named_parameters()
            if parameter.numel() == 0
        ]
        if lost:
            raise RuntimeError(f"vLLM dropped the weights of {', '.join(lost)} after packing them")
