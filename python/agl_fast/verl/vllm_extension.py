"""vLLM's worker extension on accelerators."""

from __future__ import annotations

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from agl_fast.verl.supervision.load_errors import ReportsLoadErrors


class WorkerExtension(ReportsLoadErrors, vLLMColocateWorkerExtension):
    """verl's extension; a failure ends the weight sync with its cause."""
