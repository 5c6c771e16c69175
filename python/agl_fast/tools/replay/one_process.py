"""Run verl's engine in this process, without Ray."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import TrainingWorkerConfig

from agl_fast.training.worker_groups import WorkerGroups
from agl_fast.verl.entrypoint import worker_classes


@contextmanager
def one_process() -> Iterator[None]:
    """Set up the environment of a one-process group, and destroy the group afterwards.

    Raises:
        RuntimeError: this process already belongs to a process group.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is in a process group already: replay in one of its own")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1"}
    rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    before = {name: os.environ.get(name) for name in rank}
    os.environ.update(rank)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class OneProcess:
    """Replaces verl's worker group of actor and reference.

    Args:
        config: the whole configuration, resolved.
        model: folder of the actor's weights.
        reference: folder of the reference's weights; None: no reference.
        seed: of all random generators.
    """

    def __init__(self, config: Any, model: str, reference: str | None, *, seed: int) -> None:
        np.random.seed(seed)
        torch.manual_seed(seed)
        self._actor = _worker(config, model)
        self._reference = None if reference is None else _worker(config, reference)

    @property
    def groups(self) -> WorkerGroups:
        return WorkerGroups(self, 1, reference=None if self._reference is None else self)

    def compute_log_prob(self, rows: Any) -> Any:
        return self._actor.infer_batch(rows)

    def compute_ref_log_prob(self, rows: Any) -> Any:
        assert self._reference is not None
        return self._reference.infer_batch(rows)

    def update_actor(self, rows: Any) -> Any:
        return self._actor.train_mini_batch(rows)

    def trains_trees(self) -> list[bool]:
        parts = [self._actor, *([] if self._reference is None else [self._reference])]
        return [hasattr(part, "trains_trees") and part.trains_trees() for part in parts]

    def set_loss_fn(self, loss: Any) -> None:
        self._actor.set_loss_fn(loss)

    def weights(self) -> dict[str, torch.Tensor]:
        """The actor's weights by name, on the CPU."""
        module = self._actor.engine.module
        return {name: _whole(value).cpu().clone() for name, value in module.named_parameters()}


def fingerprint(weights: dict[str, torch.Tensor]) -> str:
    """SHA-256 of all weights, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _whole(value: Any) -> torch.Tensor:
    whole: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.detach()


def _worker(config: Any, model: str) -> Any:
    config = config.copy()
    config.actor_rollout_ref.model.path = model
    _, worker_class = worker_classes(config)
    return actor_worker(config, worker_class)


def actor_worker(config: Any, worker_class: type[Any]) -> Any:
    """Create verl's training worker with the actor's model and optimizer in this process.

    Args:
        config: the whole configuration, resolved.
        worker_class: verl's TrainingWorker or a subclass.
    """
    parts = config.actor_rollout_ref
    actor = omega_conf_to_dataclass(parts.actor)
    # The engine settings of verl's own actor worker.
    engine = actor.engine
    engine.use_dynamic_bsz = actor.use_dynamic_bsz
    engine.max_token_len_per_gpu = actor.ppo_max_token_len_per_gpu
    engine.micro_batch_size_per_gpu = actor.ppo_micro_batch_size_per_gpu
    engine.infer_max_token_len_per_gpu = parts.rollout.log_prob_max_token_len_per_gpu
    engine.infer_micro_batch_size_per_gpu = parts.rollout.log_prob_micro_batch_size_per_gpu
    worker = worker_class(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=omega_conf_to_dataclass(parts.model),
            engine_config=engine,
            optimizer_config=actor.optim,
            checkpoint_config=actor.checkpoint,
        )
    )
    worker.reset()
    return worker
