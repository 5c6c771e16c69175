"""Start and end of a run: Ray, workers, servers, trainer.

The training loop runs in this process, Ray's driver. Store, proxy and rows are local, errors do not
pass through Ray, and a deadline can interrupt the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray
from omegaconf import OmegaConf, open_dict
from verl.single_controller.ray import RayWorkerGroup, ResourcePoolManager
from verl.trainer.ppo.utils import Role, create_rl_sampler, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name

from agl_fast.proxy.answer_checks import ModelLimits
from agl_fast.rollouts import AgentModeDaemon
from agl_fast.training import AgentLightningTrainer
from agl_fast.training.checkpoints import last_saved_step
from agl_fast.training.datasets import Samples
from agl_fast.training.worker_groups import require_tree_workers, set_objectives
from agl_fast.tree.refusals import require_tree_config
from agl_fast.verl.config.attention_choice import CRITIC, uses_engine
from agl_fast.verl.config.servers import answer_limit
from agl_fast.verl.device_choice import CPU, PLATFORM_VARIABLE
from agl_fast.verl.platform_cpu.registration import require_cpu
from agl_fast.verl.preflight import check_device, check_tree_engine, trains_trees
from agl_fast.verl.ray_cluster import Daemons, Placements, ray_cluster
from agl_fast.verl.supervision.deadlines import Deadlines
from agl_fast.verl.supervision.interrupts import Interrupts, interruptible
from agl_fast.verl.supervision.log_output import messages_shown
from agl_fast.verl.supervision.run_errors import add_note, say_once
from agl_fast.verl.supervision.run_scope import nothing_left_behind
from agl_fast.verl.supervision.watch import watched

logger = logging.getLogger(__name__)

POOL = "global_pool"


def run(
    *,
    config: Any,
    train_dataset: Any,
    val_dataset: Any = None,
    store: Any,
    llm_proxy: Any = None,
    adapter: Any = None,
    trainer_cls: type[Any] | None = None,
    daemon_cls: type[Any] | None = None,
) -> None:
    """Train. After any outcome, no process and no shared memory of the run is left.

    Args:
        config: of `VERL(config)`, which has checked it.
        train_dataset, val_dataset: samples by index, with a length.
        store, llm_proxy, adapter: Agent-lightning's.
        trainer_cls, daemon_cls: None: `AgentLightningTrainer`, `AgentModeDaemon`.

    Raises:
        ValueError: verl in this process has another device than the configuration, or the tree
            engine does not support the model.
        RuntimeError, TimeoutError: the message names what failed; its error is the cause.
    """
    config = config.copy()
    OmegaConf.resolve(config)
    check_device(config)  # again: this process may be another one than that of `VERL(config)`
    check_tree_engine(config)  # again: the model may have been on the hub only
    with ExitStack() as ends:
        ends.enter_context(messages_shown())
        ends.enter_context(error_said_once())
        ends.enter_context(outside_event_loop())
        interrupts = ends.enter_context(interruptible())
        scope = ends.enter_context(nothing_left_behind())
        daemons = ends.enter_context(ray_cluster(config, scope, interrupts))
        trainer = (trainer_cls or AgentLightningTrainer)(
            store=store,
            llm_proxy=llm_proxy,
            adapter=adapter,
            daemon_cls=daemon_cls or AgentModeDaemon,
            **trainer_arguments(config, train_dataset, val_dataset),
        )
        trainer.tree_is_refused = is_refused_as_tree(config)
        ends.callback(end_actors, trainer, daemons)
        ends.callback(scope.note_segments)  # while they are mapped
        ends.enter_context(interruption_said(trainer, interrupts, config))
        deadlines = Deadlines.of(config)
        placements = Placements(deadlines.placement)
        with watched("starting the workers and servers", deadlines.start, placements):
            trainer.init_workers()
            require_loadable_weights(trainer)
            if trains_trees(config):
                require_tree_workers(trainer.worker_groups())
            set_objectives(trainer.worker_groups(), config)  # a loss that they lack is said now
        trainer.fit()


def is_refused_as_tree(config: Any) -> bool:
    """Whether level tree does not support the model or its settings."""
    try:
        require_tree_config(config)
    except ValueError:
        return True
    return False


def trainer_arguments(config: Any, train_dataset: Any, val_dataset: Any) -> dict[str, Any]:
    """Arguments of verl's trainer, for this machine."""
    actor_worker, critic_worker = worker_classes(config)
    lora = config.actor_rollout_ref.model
    is_lora = max(lora.get("lora", {}).get("rank", 0), lora.get("lora_rank", 0)) > 0
    reference_in_actor = is_lora or lora.get("lora_adapter_path") is not None
    actor_role = Role.ActorRollout
    if need_reference_policy(config) and not reference_in_actor:
        actor_role = Role.ActorRolloutRef
    workers = {actor_role: ray.remote(actor_worker), Role.Critic: ray.remote(critic_worker)}
    with open_dict(config):  # as verl's own task runner: there is no pool of its own
        config.reward.reward_model.nnodes = config.trainer.nnodes
        config.reward.reward_model.n_gpus_per_node = config.trainer.n_gpus_per_node

    model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    samples = Samples(train_dataset)
    return {
        "config": config,
        "tokenizer": model.tokenizer,
        "processor": model.processor,
        "role_worker_mapping": workers,
        "resource_pool_manager": ResourcePoolManager(
            resource_pool_spec={POOL: [config.trainer.n_gpus_per_node] * config.trainer.nnodes},
            mapping=dict.fromkeys(workers, POOL),
        ),
        "train_dataset": samples,
        "val_dataset": None if val_dataset is None else Samples(val_dataset),
        "model_limits": model_limits(
            model, config.actor_rollout_ref.rollout.max_model_len, answer_limit(config)
        ),
        "train_sampler": create_rl_sampler(config.data, samples),
        "ray_worker_group_cls": partial(RayWorkerGroup, worker_env=environment_of_workers()),
    }


def environment_of_workers() -> dict[str, str]:
    """Environment in which verl's workers choose the CPU; GPUs they detect themselves."""
    return {PLATFORM_VARIABLE: CPU} if get_device_name() == CPU else {}


def model_limits(
    model: Any, max_model_len: int | None, max_tokens: int | None = None
) -> ModelLimits:
    """Limits against which the proxy checks the servers' answers.

    Args:
        model: verl's HFModelConfig.
        max_model_len: of the servers; None: the model's own.
        max_tokens: of every answer; None: only what a request says.
    """
    text = model.hf_config.get_text_config()
    end_id = getattr(model.tokenizer, "eos_token_id", None)
    return ModelLimits(
        vocabulary_size=getattr(text, "vocab_size", None),
        context_length=max_model_len or getattr(text, "max_position_embeddings", None),
        end_ids=frozenset() if end_id is None else frozenset({end_id}),
        max_tokens=max_tokens,
    )


def worker_classes(config: Any) -> tuple[type[Any], type[Any]]:
    """Worker classes of actor and reference, and of the critic, for this machine."""
    on_cpu = get_device_name() == "cpu"
    if on_cpu:
        require_cpu()
    actor, _ = _worker_classes(on_cpu=on_cpu, trees=uses_engine(config))
    _, critic = _worker_classes(on_cpu=on_cpu, trees=uses_engine(config, CRITIC))
    return actor, critic


def _worker_classes(*, on_cpu: bool, trees: bool) -> tuple[type[Any], type[Any]]:
    # Imported on use: the modules register engines.
    if trees:
        from agl_fast.tree import tree_workers as of_trees

        if on_cpu:
            return of_trees.CpuTreeActorRolloutRefWorker, of_trees.CpuTreeTrainingWorker
        return of_trees.TreeActorRolloutRefWorker, of_trees.TreeTrainingWorker
    if on_cpu:
        from agl_fast.verl.platform_cpu import cpu_workers as of_cpu

        return of_cpu.CpuActorRolloutRefWorker, of_cpu.CpuTrainingWorker
    from agl_fast.verl import gpu_workers as of_gpu

    return of_gpu.GpuActorRolloutRefWorker, of_gpu.GpuTrainingWorker


def require_loadable_weights(trainer: Any) -> None:
    """On a CPU: raise if a server could not load new weights, or a worker lacks an engine."""
    if get_device_name() != "cpu":
        return
    trainer.actor_rollout_wg.registration()
    servers = trainer.llm_server_manager.server_handles
    ray.get([server.collective_rpc.remote("require_loadable_weights") for server in servers])


@contextmanager
def error_said_once() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        say_once(error)
        raise


@contextmanager
def interruption_said(trainer: Any, interrupts: Interrupts, config: Any) -> Iterator[None]:
    """Log the step of an interruption and how to continue; add the latter to other errors."""
    try:
        yield
    except BaseException as error:
        how = how_to_go_on(config)
        if interrupts.terminated or isinstance(error, KeyboardInterrupt):
            by = "by SIGTERM " if interrupts.terminated else ""
            step = trainer.global_steps
            where = f"in step {step}" if step else "before step 1"
            logger.info("interrupted %s%s of %d", by, where, trainer.total_training_steps)
            if how:
                logger.info("%s", how)
        elif how:
            add_note(error, how)
        raise


def how_to_go_on(config: Any) -> str:
    """The saved step and how to continue from it; empty if the run saves no checkpoints."""
    folder = OmegaConf.select(config, "trainer.default_local_dir")
    if folder is None or not config.trainer.save_freq > 0:
        return ""
    step = last_saved_step(folder)
    if step is None:
        return f"No step is saved yet (trainer.save_freq={config.trainer.save_freq})"
    where = Path(folder).absolute() / f"global_step_{step}"
    mode = config.trainer.resume_mode
    by = "the same command" if mode == "auto" else "trainer.resume_mode=auto"
    known = " (trainer.resume_mode=auto)" if mode == "auto" else ""
    return f"Step {step} is saved in {where}: {by} continues from it{known}"


def end_actors(trainer: Any, daemons: Daemons) -> None:
    """End the trainer's actors and release their resources, also in an existing cluster."""
    if daemons.is_lost():
        return
    manager = getattr(trainer, "llm_server_manager", None)
    actors = list(manager.server_handles) if manager is not None else []
    for group in ("actor_rollout_wg", "critic_wg"):
        if hasattr(trainer, group):
            actors += getattr(trainer, group).workers
    for actor in actors:
        ray.kill(actor)
    for pool in trainer.resource_pool_manager.resource_pool_dict.values():
        for placement in pool.pgs or []:
            ray.util.remove_placement_group(placement)


@contextmanager
def outside_event_loop() -> Iterator[None]:
    """Hide the running event loop.

    Agent-lightning's Trainer calls a synchronous algorithm inside its event loop, which is blocked
    meanwhile. If verl finds a running loop, it waits on threads that no signal interrupts.
    """
    running = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(running)
