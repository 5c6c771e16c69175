"""verl's workers with the engine for trees. Importing this module registers it."""

from __future__ import annotations

import os
from typing import Any

from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from agl_fast.tree.engine import VENDOR, TrainsTrees
from agl_fast.verl.platform_cpu.cpu_workers import CpuActorRolloutRefWorker, CpuTrainingWorker
from agl_fast.verl.platform_cpu.value_models import load_value_models_as_configured

# By which verl chooses among engines of the same device.
_VENDOR_VARIABLE = "VERL_ENGINE_VENDOR"


class _OfTrees:
    """Mixin in front of a training worker, whose engine verl makes with it."""

    engine: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        load_value_models_as_configured()
        before = os.environ.get(_VENDOR_VARIABLE)
        os.environ[_VENDOR_VARIABLE] = VENDOR
        try:
            super().__init__(*args, **kwargs)
        finally:
            del os.environ[_VENDOR_VARIABLE]
            if before is not None:
                os.environ[_VENDOR_VARIABLE] = before

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def trains_trees(self) -> bool:
        """Whether rows may be trees."""
        return isinstance(self.engine, TrainsTrees)


class TreeTrainingWorker(_OfTrees, TrainingWorker):
    """On an accelerator."""


class CpuTreeTrainingWorker(_OfTrees, CpuTrainingWorker):
    """On the host."""


class _ActorOfTrees:
    """Mixin in front of a worker with actor and reference."""

    actor: Any
    ref: Any

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def trains_trees(self) -> bool:
        """Whether rows may be trees."""
        parts = [part for part in (self.actor, self.ref) if part is not None]
        return all(part.trains_trees() for part in parts)


class TreeActorRolloutRefWorker(_ActorOfTrees, ActorRolloutRefWorker):
    """On an accelerator."""

    actor_worker_cls = TreeTrainingWorker
    ref_worker_cls = TreeTrainingWorker


class CpuTreeActorRolloutRefWorker(_ActorOfTrees, CpuActorRolloutRefWorker):
    """On the host."""

    actor_worker_cls = CpuTreeTrainingWorker
    ref_worker_cls = CpuTreeTrainingWorker
