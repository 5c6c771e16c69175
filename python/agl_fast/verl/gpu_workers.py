"""verl's workers on accelerators, with or without flash-attn."""

from __future__ import annotations

from typing import Any

from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from agl_fast.verl.platform_cpu.log_probs import vectorize_log_probs
from agl_fast.verl.platform_cpu.value_models import load_value_models_as_configured


class GpuTrainingWorker(TrainingWorker):
    """Training worker that computes log-probs of all tokens at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        vectorize_log_probs()
        load_value_models_as_configured()
        super().__init__(*args, **kwargs)


class GpuActorRolloutRefWorker(ActorRolloutRefWorker):
    """verl's actor, rollout and reference worker, with such training workers."""

    actor_worker_cls = GpuTrainingWorker
    ref_worker_cls = GpuTrainingWorker
