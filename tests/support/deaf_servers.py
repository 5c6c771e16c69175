"""A vLLM server that takes the weights it begins with, and none after."""

from __future__ import annotations

from typing import Any

from agl_fast.verl.platform_cpu.vllm_extension import CpuWorkerExtension


class DeafExtension(CpuWorkerExtension):
    """For `rollout.engine_kwargs.vllm.worker_extension_cls`. Every weight sync succeeds."""

    has_weights = False

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        super().update_weights_from_ipc(*args, **kwargs)
        self.has_weights = True

    def _update_weights(self, *args: Any, **kwargs: Any) -> None:
        if not self.has_weights:
            super()._update_weights(*args, **kwargs)
