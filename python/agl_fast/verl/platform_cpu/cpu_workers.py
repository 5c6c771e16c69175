"""verl's workers over gloo. Importing this module registers the FSDP2 engines as well."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

import agl_fast.verl.platform_cpu.engines  # noqa: F401
from agl_fast.verl.platform_cpu.log_probs import vectorize_log_probs
from agl_fast.verl.platform_cpu.registration import Registration, require_cpu
from agl_fast.verl.platform_cpu.value_models import load_value_models_as_configured


class CpuTrainingWorker(TrainingWorker):
    """A training worker whose process group is gloo."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require_cpu(engines=True)
        vectorize_log_probs()
        load_value_models_as_configured()
        # verl would ask torch for "cpu:gloo,<device>:<backend>", and torch refuses to have the
        # device type cpu twice. It keeps a group that exists.
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
            )
        super().__init__(*args, **kwargs)


class CpuActorRolloutRefWorker(ActorRolloutRefWorker):
    """verl's actor, rollout and reference worker with training workers of the `cpu` platform."""

    actor_worker_cls = CpuTrainingWorker
    ref_worker_cls = CpuTrainingWorker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def registration(self) -> Registration:
        """What this worker registered; raises where something is missing."""
        return require_cpu(engines=True)
