"""verl's workers with the engines for trees. Importing this module registers the engines."""

from __future__ import annotations

import os
from typing import Any

from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from agl_fast.tree.engine import VENDOR, TrainsTrees
from agl_fast.verl.platform_cpu.cpu_workers import CpuActorRolloutRefWorker, CpuTrainingWorker
from agl_fast.verl.platform_cpu.value_models import load_value_models_as_configured

# verl selects engines of the same device by it.
_VENDOR_VARIABLE = "VERL_ENGINE_VENDOR"


class _OfTrees:
    """Mixin for a training worker: selects the engine for trees."""

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
        """Whether the engine supports prefix trees."""
        return isinstance(self.engine, TrainsTrees)


class TreeTrainingWorker(_OfTrees, TrainingWorker):
    """On an accelerator."""


class CpuTreeTrainingWorker(_OfTrees, CpuTrainingWorker):
    """On the host."""


class _ActorOfTrees:
    """Mixin for a worker with actor and reference."""

    actor: Any
    ref: Any

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def trains_trees(self) -> bool:
        """Whether the engine supports prefix trees."""
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
