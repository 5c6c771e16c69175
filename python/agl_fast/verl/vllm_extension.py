"""vLLM's worker extension where there is an accelerator."""

from __future__ import annotations

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from agl_fast.verl.supervision.load_errors import ReportsLoadErrors


class WorkerExtension(ReportsLoadErrors, vLLMColocateWorkerExtension):
    """verl's, whose failures end a weight sync with the cause."""
