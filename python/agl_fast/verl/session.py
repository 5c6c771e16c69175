"""verl's trainer, its Ray cluster and its vLLM servers, from start to end.

The training loop runs in this process, Ray's driver, and not in a task-runner actor as verl's own
entry point has it: the loop has the rollouts, the rows and the console at hand, an error needs no
trip through Ray, a deadline can interrupt it, and one process less has to import verl.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import SequentialSampler
from transformers import AutoTokenizer
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.trainer.ppo.ray_trainer import ResourcePoolManager
from verl.trainer.ppo.utils import Role
from verl.utils.config import validate_config

from agl_fast.platform_cpu.registration import Registration, require_cpu
from agl_fast.platform_cpu.workers import CpuActorRolloutRefWorker
from agl_fast.verl.trainer.row_trainer import RowTrainer

CONFIG = Path(__file__).with_name("quickstart.yaml")
SERVER_CHECK_SECONDS = 60.0
POOL = "actor_and_rollout"


def compose_config(model_folder: Path, *, steps: int, overrides: Sequence[str]) -> DictConfig:
    """verl's defaults, over them `quickstart.yaml`, what this run decides, and `key=value`s."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        defaults = compose("ppo_trainer")
    OmegaConf.set_struct(defaults, False)
    of_run = {
        "actor_rollout_ref": {"model": {"path": str(model_folder)}},
        "trainer": {"total_training_steps": steps},
    }
    of_user = OmegaConf.from_dotlist(list(overrides))
    config = OmegaConf.merge(defaults, OmegaConf.load(CONFIG), of_run, of_user)
    OmegaConf.resolve(config)
    validate_config(config=config, use_reference_policy=False, use_critic=False)
    return config


@contextmanager
def local_ray(folder: Path, *, slots: int, log_to_driver: bool) -> Iterator[None]:
    """A Ray cluster of this process, with `slots` logical accelerators."""
    ray.init(
        address="local",
        # A worker group reserves three CPUs per slot, the server actor one to start.
        num_cpus=3 * slots + 1,
        num_gpus=slots,
        object_store_memory=256 << 20,
        include_dashboard=False,
        log_to_driver=log_to_driver,
        logging_level="WARNING",
        runtime_env=get_ppo_ray_runtime_env(),
        _temp_dir=str(folder),
    )
    try:
        yield
    finally:
        ray.shutdown()


def start_trainer(config: DictConfig, tasks: Sequence[Any]) -> RowTrainer:
    """Start the actor and the vLLM servers; the servers' weights are still random."""
    require_cpu()
    trainer = RowTrainer(
        config=config,
        tokenizer=AutoTokenizer.from_pretrained(config.actor_rollout_ref.model.path),
        role_worker_mapping={Role.ActorRollout: ray.remote(CpuActorRolloutRefWorker)},
        resource_pool_manager=ResourcePoolManager(
            resource_pool_spec={POOL: [config.trainer.n_gpus_per_node] * config.trainer.nnodes},
            mapping={Role.ActorRollout: POOL},
        ),
        train_dataset=tasks,
        val_dataset=tasks,
        train_sampler=SequentialSampler(tasks),
        collate_fn=list,
    )
    trainer.init_workers()
    return trainer


def require_registrations(trainer: RowTrainer) -> list[Registration]:
    """What every worker registered. Raises where a worker or a server lacks something."""
    registrations: list[Registration] = trainer.actor_rollout_wg.registration()
    servers = trainer.llm_server_manager.server_handles
    ray.get(
        [server.collective_rpc.remote("require_loadable_weights") for server in servers],
        timeout=SERVER_CHECK_SECONDS,
    )
    return registrations
