"""A vLLM worker whose receiving end of the weight sync fails before it answers the sender."""

from typing import Any

from agl_fast.platform_cpu.vllm_extension import CpuWorkerExtension


class FailingSync(CpuWorkerExtension):
    def update_weights_from_ipc(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("this receiver fails")
