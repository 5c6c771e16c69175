"""`AgentLightningTrainer`: verl's trainer with agent rollouts.

The only module that depends on verl's RayPPOTrainer, which verl has deprecated.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm
from verl import DataProto
from verl.trainer.ppo import ray_trainer
from verl.trainer.ppo.metric_utils import compute_throughout_metrics, compute_timing_metrics
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.tracking import Tracking

import agl_fast
from agl_fast.proxy.answer_checks import ModelLimits
from agl_fast.rollouts import AgentModeDaemon, ValidatedRollout, validation_metrics
from agl_fast.training.checkpoints import (
    last_whole_checkpoint,
    point_to_loadable_checkpoint,
    remove_lock,
)
from agl_fast.training.collection import Collection, SamplesExhaustedError, collects
from agl_fast.training.credit import credit_assignment
from agl_fast.training.datasets import columns_of, repeated
from agl_fast.training.policy_audit import PolicyAudit
from agl_fast.training.run_recording import padding_token_id, run_recorder, token_summary
from agl_fast.training.run_summary import EmptySteps, closing_lines, note_worst_audit
from agl_fast.training.sample_stream import SampleStream
from agl_fast.training.step import PpoStep, ppo_step, step_without_rows, timed
from agl_fast.training.step_metrics import configured_widths
from agl_fast.training.step_rows import Rows
from agl_fast.training.worker_groups import WorkerGroups
from agl_fast.verl.config.servers import served_model_name
from agl_fast.verl.supervision.deadlines import Deadlines
from agl_fast.verl.supervision.watch import ServersAlive, WorkersAlive, watched

if TYPE_CHECKING:  # imported later, after agl_fast.rollouts has silenced litellm
    from agentlightning import LightningStore, LLMProxy
    from agentlightning.adapter import TraceAdapter

logger = logging.getLogger(__name__)


class AgentLightningTrainer(RayPPOTrainer):
    """Train the model behind an agent.

    A step: the daemon runs the samples through the agents and returns their calls as a batch,
    `ppo_step` updates the model, the servers get the new weights. A subclass may override `sample`,
    `learn`, `sync_weights` and `validate`.

    Args:
        store, llm_proxy, adapter: Agent-lightning's, for the daemon. Without a store: mode v0.
        daemon_cls: `AgentModeDaemon`, or a class with its methods.
        train_dataset, val_dataset: sequences of samples as dictionaries. Without a val_dataset
            there is no validation.
        arguments: keyword arguments of verl's RayPPOTrainer.
    """

    # Level tree does not support the run's model or settings.
    tree_is_refused = False
    # Not saved in checkpoints: after a resume, the first step is the baseline again.
    policy_audit: PolicyAudit | None = None
    model_limits: ModelLimits | None = None
    # While groups are collected one by one.
    collection: Collection | None = None

    def __init__(
        self,
        store: LightningStore | None,
        llm_proxy: LLMProxy | None,
        adapter: TraceAdapter[Any] | None,
        daemon_cls: type[Any] = AgentModeDaemon,
        *,
        train_dataset: Any,
        val_dataset: Any = None,
        model_limits: ModelLimits | None = None,
        **arguments: Any,
    ) -> None:
        arguments.setdefault("collate_fn", columns_of)
        self.store = store
        self.llm_proxy = llm_proxy
        self.adapter = adapter
        self.daemon_cls = daemon_cls
        self.model_limits = model_limits
        self.validates = val_dataset is not None
        super().__init__(
            train_dataset=train_dataset,
            # verl's data loader requires one.
            val_dataset=val_dataset if self.validates else train_dataset,
            **arguments,
        )
        self.global_steps = 0
        self.synced_steps = 0

    def init_workers(self) -> None:
        """Start the workers, and the servers: with `collection.mode=overlap` on their own GPUs."""
        rollout = self.config.actor_rollout_ref.rollout
        with standalone_servers() if rollout.nnodes > 0 else nullcontext():
            super().init_workers()

    def fit(self) -> None:
        """Train until the last step, or only validate (`trainer.val_only`).

        Raises:
            EmptyBatchError: too many consecutive empty steps.
            NothingTrainedError: the run ended, and every step was empty.
            PolicyMismatchError: the servers sample with other weights than the actor's.
            RuntimeError: a server or worker died; its error is the cause.
            TimeoutError: a deadline passed.
        """
        self.servers_alive = ServersAlive(
            self.llm_server_manager.get_addresses(),
            self.llm_server_manager.server_handles,
            self.deadlines().server_silent,
        )
        self.workers_alive = WorkersAlive(self.actor_rollout_wg.workers)
        self.tracking = Tracking(
            project_name=self.config.trainer.project_name,
            experiment_name=self.config.trainer.experiment_name,
            default_backend=self.config.trainer.logger,
            config=OmegaConf.to_container(self.config, resolve=True),
        )
        self.token_summary = token_summary(self.config, tree_is_refused=self.tree_is_refused)
        self.worst_audit: dict[str, float] = {}
        self.empty_steps = EmptySteps(self.config.agentlightning.max_empty_steps)
        exit_code = 1
        try:
            self.global_steps = 0
            with watched("loading the checkpoint", self.deadlines().checkpoint):
                self._load_checkpoint()
            self.sync_weights()
            self.agent_mode_daemon = self.make_daemon()
            self.agent_mode_daemon.start()
            try:
                self._fit()
                self.empty_steps.require_updates()
            finally:
                if hasattr(self.agent_mode_daemon, "stop"):
                    self.agent_mode_daemon.stop()
                self._report_tokens()
            exit_code = 0
        finally:
            self._shutdown_dump_executor()
            self.tracking.finish(exit_code=exit_code)

    def _load_checkpoint(self) -> None:
        parts = ("actor", "critic") if self.use_critic else ("actor",)
        if repaired := point_to_loadable_checkpoint(self.config, parts):
            logger.warning("%s", repaired)
        super()._load_checkpoint()

    def _save_checkpoint(self) -> None:
        if self.collection is not None:
            self.collection.save(self._checkpoint_folder())
        super()._save_checkpoint()
        folder = self.config.trainer.default_local_dir
        remove_lock(os.path.join(folder, f"global_step_{self.global_steps}"))

    def _fit(self) -> None:
        trainer = self.config.trainer
        if self.validates and (trainer.val_before_train or trainer.val_only):
            metrics = self.validate()
            logger.info("Initial validation metrics: %s", metrics)
            self.tracking.log(data=metrics, step=self.global_steps)
        if trainer.val_only:
            return
        with tqdm(
            total=self.total_training_steps, initial=self.global_steps, desc="Training Progress"
        ) as progress:
            for metrics in self._collected_steps() if collects(self.config) else self._steps():
                self.token_summary.add(metrics)
                note_worst_audit(self.worst_audit, metrics)
                metrics["training/global_step"] = self.global_steps
                self.tracking.log(data=metrics, step=self.global_steps)
                progress.update(1)

    def _steps(self) -> Iterator[dict[str, float]]:
        """Train one batch of samples after another; yields the metrics of each step."""
        first_epoch = self.global_steps // len(self.train_dataloader)
        for epoch in range(first_epoch, self.config.trainer.total_epochs):
            for columns in self.train_dataloader:
                if self.global_steps >= self.total_training_steps:
                    return
                self.global_steps += 1
                metrics = self._train_step(columns)
                yield {**metrics, "training/epoch": epoch}

    def _collected_steps(self) -> Iterator[dict[str, float]]:
        """Train groups as they are collected; yields the metrics of each step."""
        stream = self._sample_stream()
        self.collection = Collection(
            self.agent_mode_daemon, self.config, stream, self._put_servers_to_sleep
        )
        addresses = self.llm_server_manager.get_addresses()
        self.agent_mode_daemon.policy_version = self.synced_steps
        self.collection.begin(addresses, self.total_training_steps - self.global_steps)
        try:
            while self.global_steps < self.total_training_steps:
                self.global_steps += 1
                try:
                    metrics = self._train_step(None)
                except SamplesExhaustedError:
                    self.global_steps -= 1
                    logger.warning(
                        "All samples are used up after step %d of %d.",
                        self.global_steps,
                        self.total_training_steps,
                    )
                    return
                yield {**metrics, "training/epoch": stream.epoch}
        finally:
            self.collection.end()
            self.collection = None

    def _sample_stream(self) -> SampleStream:
        """The stream that continues the loaded checkpoint."""
        trainer = self.config.trainer
        folder = self._checkpoint_folder() if self.global_steps else None
        epoch = self.global_steps // len(self.train_dataloader)
        return SampleStream.resumed(self.train_dataloader, trainer.total_epochs, folder, epoch)

    def _checkpoint_folder(self) -> Path:
        """The folder of this step's checkpoint."""
        trainer = self.config.trainer
        root = trainer.default_local_dir
        if trainer.resume_mode == "resume_path" and self.collection is None:
            return Path(trainer.resume_from_path)
        return Path(root) / f"global_step_{self.global_steps}"

    def _train_step(self, columns: dict[str, NDArray[Any]] | None) -> dict[str, float]:
        """Train one step.

        Args:
            columns: the samples; None: those of the groups that are collected.
        """
        trainer = self.config.trainer
        is_last = self.global_steps >= self.total_training_steps
        seconds: dict[str, float] = {}
        with timed("step", seconds):
            step, metrics = self._sample_and_learn(columns, seconds, is_last=is_last)
            metrics |= self.empty_steps.count(step.empty)
            if trainer.get("rollout_data_dir") and step.empty is None:
                self._dump_rows(step.rows, trainer.rollout_data_dir)
            if trainer.save_freq > 0 and (is_last or self.global_steps % trainer.save_freq == 0):
                with (
                    timed("save_checkpoint", seconds),
                    last_whole_checkpoint(trainer.default_local_dir, self.global_steps),
                    watched("saving the checkpoint", self.deadlines().checkpoint),
                ):
                    self._save_checkpoint()
            with timed("update_weights", seconds), self._calls_held():
                self.sync_weights()
        if (
            self.validates
            and trainer.test_freq > 0
            and (is_last or self.global_steps % trainer.test_freq == 0)
        ):
            with timed("testing", seconds):
                validated = self.validate()
            metrics |= validated
            if is_last:
                logger.info("Final validation metrics: %s", validated)
        seconds |= step.seconds
        return metrics | step.metrics | self._timing_metrics(step.rows, seconds)

    def _sample_and_learn(
        self, columns: dict[str, NDArray[Any]] | None, seconds: dict[str, float], *, is_last: bool
    ) -> tuple[PpoStep, dict[str, float]]:
        with timed("gen", seconds):
            try:
                if self.collection is not None:
                    self.servers_alive.begin()
                    n_rollouts = self.collection.collect()
                    batch, metrics = self._batch()
                else:
                    assert columns is not None
                    batch, metrics = self.sample(columns)
                    n_rollouts = self._n_rollouts(columns)
            except agl_fast.EmptyBatchError as empty:
                return step_without_rows(empty), dict(empty.metrics)
        profiled_steps = self.config.global_profiler.steps or ()
        is_profiled = self.global_steps in profiled_steps
        self._start_profiling(is_profiled)
        step = self.learn(batch, n_rollouts=n_rollouts)
        self._stop_profiling(
            is_profiled,
            run_command=is_last or self.global_steps == max(profiled_steps, default=0),
        )
        return step, metrics

    def sample(self, columns: dict[str, NDArray[Any]]) -> tuple[agl_fast.Batch, dict[str, float]]:
        """Run the samples through the agents, then put the servers to sleep.

        Returns:
            The batch of their calls, and metrics `training/*`.

        Raises:
            EmptyBatchError: no rollout gave a row.
        """
        self._run_agents(columns, is_train=True)
        try:
            sampled = self._batch()
        except agl_fast.EmptyBatchError:
            self._end_sampling()
            raise
        self._end_sampling()
        return sampled

    def _batch(self) -> tuple[agl_fast.Batch, dict[str, float]]:
        daemon = self.agent_mode_daemon
        widths = configured_widths(self.config)
        arguments = {
            "max_prompt_length": widths[0],
            "max_response_length": widths[1],
            "device": "cpu",
            "global_steps": self.global_steps,
        }
        get = getattr(daemon.get_train_data_batch, "__func__", None)
        if get is AgentModeDaemon.get_train_data_batch:
            batch, metrics = daemon.training_batch(**arguments)
            return batch, metrics
        # An override may return other rows than those of its last batch.
        rows, metrics = daemon.get_train_data_batch(**arguments)
        batch = replace(
            daemon.last_batch,
            tensors=dict(rows.batch.items()),
            columns=dict(rows.non_tensor_batch),
        )
        return batch, metrics

    def _calls_held(self) -> AbstractContextManager[None]:
        """Hold the calls of rollouts that go on across a weight sync."""
        if self.collection is None:
            return nullcontext()
        return self.collection.syncing(self.global_steps)

    def _end_sampling(self) -> None:
        self.agent_mode_daemon.clear_data_and_server()
        self._put_servers_to_sleep()

    def _put_servers_to_sleep(self) -> None:
        self.servers_alive.begin()
        with watched("putting the servers to sleep", self.deadlines().sleep, self.servers_alive):
            self.checkpoint_manager.sleep_replicas()

    def learn(self, batch: agl_fast.Batch, *, n_rollouts: int) -> PpoStep:
        """Run one `ppo_step` with this trainer's workers."""
        if self.policy_audit is None:
            self.policy_audit = PolicyAudit.of(self.config)
        self.servers_alive.begin()
        with watched(f"the update of step {self.global_steps}", self.deadlines().update):
            return ppo_step(
                batch,
                self.worker_groups(),
                self.config,
                n_rollouts=n_rollouts,
                global_step=self.global_steps,
                kl_controller=getattr(self, "kl_ctrl_in_reward", None),
                update_actor=self.global_steps >= self.config.trainer.critic_warmup,
                policy_audit=self.policy_audit,
                policy_version=self.synced_steps if self.collection is not None else None,
            )

    def worker_groups(self) -> WorkerGroups:
        return WorkerGroups(
            actor=self.actor_rollout_wg,
            n_actor_ranks=self._get_dp_size(self.actor_rollout_wg, "actor"),
            reference=self.ref_policy_wg if self.use_reference_policy else None,
            reference_is_base_of_actor=self.ref_in_actor,
            critic=self.critic_wg if self.use_critic else None,
            n_critic_ranks=self._get_dp_size(self.critic_wg, "train") if self.use_critic else 1,
        )

    def sync_weights(self) -> None:
        """Send the actor's weights to the servers and wake them up."""
        what = f"the weight sync after step {self.global_steps}"
        self.servers_alive.begin()
        with watched(what, self.deadlines().sync, self.servers_alive):
            self.checkpoint_manager.update_weights(self.global_steps)
        self.synced_steps = self.global_steps

    def validate(self) -> dict[str, float]:
        """Run the agents on val_dataset, `val_kwargs.n` rollouts per sample.

        Returns:
            `val/*` over all rollouts, and verl's `val-core/*` and `val-aux/*`.
        """
        validated: list[ValidatedRollout] = []
        metrics: dict[str, float] = {}
        n_batches = 0
        for columns in self.val_dataloader:
            times = self.config.actor_rollout_ref.rollout.val_kwargs.n
            self._run_agents(repeated(columns, times), is_train=False)
            metrics = self.agent_mode_daemon.get_test_metrics()
            validated += self.agent_mode_daemon.validated_rollouts
            n_batches += 1
            self.agent_mode_daemon.clear_data_and_server()
        # A subclass of the daemon may add metrics to those of its batch.
        of_rollouts = metrics if n_batches == 1 else validation_metrics(validated)
        return of_rollouts | self._verl_validation_metrics(validated)

    def _verl_validation_metrics(self, validated: Sequence[ValidatedRollout]) -> dict[str, Any]:
        """`val-core/{data_source}/reward/mean@n`, …: rewards of the `n` rollouts of each sample.

        `val-aux/num_turns/*` counts calls. The default data_source is "unknown".
        """
        times = self.config.actor_rollout_ref.rollout.val_kwargs.n
        metrics: dict[str, Any] = RayPPOTrainer._val_metrics_update(
            self,
            [each.data_source or "unknown" for each in validated],
            [index // times for index in range(len(validated))],
            {"reward": [each.reward for each in validated]},
            [np.array([len(each.response_lengths) for each in validated])] if validated else [],
        )
        return {name: float(value) for name, value in metrics.items()}

    def deadlines(self) -> Deadlines:
        """The run's deadlines; some depend on the model's size, known after its download."""
        return Deadlines.of(self.config)

    def check_while_sampling(self) -> None:
        """Raise RuntimeError if a server or a worker is dead."""
        self.servers_alive()
        self.workers_alive()

    def _report_tokens(self) -> None:
        if self.token_summary.is_noteworthy:
            logger.warning("%s", self.token_summary)
        elif self.token_summary.n_steps:
            logger.info("%s", self.token_summary)
        failures = getattr(self.agent_mode_daemon, "failures", None)
        for line in closing_lines(self.config, self.worst_audit, failures and failures.sentence()):
            logger.info("%s", line)

    def make_daemon(self) -> Any:
        """Make the daemon with Agent-lightning 0.3's keywords, and agl_fast's that it accepts."""
        settings = self.config.agentlightning
        rollout = self.config.actor_rollout_ref.rollout
        pad_token_id = padding_token_id(self.tokenizer)
        keywords: dict[str, Any] = {
            "train_information": {
                "model": self.config.actor_rollout_ref.model.path,
                "served_model": served_model_name(self.config),
                "temperature": rollout.temperature,
                "top_p": rollout.top_p,
                "top_k": rollout.top_k,
            },
            "tokenizer": self.tokenizer,
            "mini_batch_size": self.config.actor_rollout_ref.actor.ppo_mini_batch_size,
            "pad_token_id": pad_token_id,
            "reward_fillna_value": settings.reward_fillna_value,
            "llm_timeout_seconds": settings.llm_timeout_seconds,
            "mode": "v1" if self.store is not None else "v0",
            "llm_proxy": self.llm_proxy,
            "store": self.store,
            "adapter": self.adapter,
            "processor": self.processor,
            "image_base_dir": self.config.data.get("image_base_dir"),
            "trace_aggregator": OmegaConf.to_container(settings.trace_aggregator, resolve=True),
        }
        further: dict[str, Any] = {
            "rollout_deadline_seconds": settings.rollout_deadline_seconds,
            "runner_silent_seconds": settings.runner_silent_seconds,
            "first_runner_seconds": settings.first_runner_seconds,
            "failed_rollouts": settings.failed_rollouts,
            "sampling": settings.sampling,
            "validation_sampling": {
                name: rollout.val_kwargs[name] for name in ("temperature", "top_p", "top_k")
            },
            "max_tokens": self.config.data.max_response_length,
            "proxy_settings": OmegaConf.to_container(settings.proxy, resolve=True),
            "credit": credit_assignment(settings),
            "check": self.check_while_sampling,
            "deadlines": self.deadlines(),
            "run_recorder": run_recorder(self.config, pad_token_id),
            "model_limits": self.model_limits,
        }
        accepted = _accepted_keywords(self.daemon_cls, further)
        if "credit" not in accepted and (
            settings.rollout_hook is not None or settings.credit != "identical"
        ):
            raise TypeError(
                f"agentlightning.rollout_hook={settings.rollout_hook!r} and "
                f"credit={settings.credit!r} need a daemon that takes `credit`: "
                f"{self.daemon_cls!r} does not"
            )
        return self.daemon_cls(settings.port, rollout.n, **keywords, **accepted)

    def _run_agents(self, columns: Mapping[str, NDArray[Any]], *, is_train: bool) -> None:
        daemon = self.agent_mode_daemon
        daemon.policy_version = self.synced_steps
        self.servers_alive.begin()
        daemon.set_up_data_and_server(
            columns, self.llm_server_manager.get_addresses(), is_train=is_train
        )
        daemon.run_until_all_finished()

    def _dump_rows(self, rows: Rows, folder: str) -> None:
        """Write the text of the trained rows, in verl's format."""
        texts = [
            self.tokenizer.batch_decode(rows.tensors[name], skip_special_tokens=True)
            for name in ("prompts", "responses")
        ]
        self._dump_generations(
            inputs=texts[0],
            outputs=texts[1],
            gts=[None] * len(rows),
            scores=rows.tensors["token_level_scores"].sum(dim=1).tolist(),
            reward_extra_infos_dict={
                name: rows.columns[name].tolist() for name in ("data_id_list", "rollout_id_list")
            },
            dump_path=folder,
        )

    def _n_rollouts(self, columns: Mapping[str, NDArray[Any]]) -> int:
        n_samples = max(len(column) for column in columns.values())
        return n_samples * int(self.config.actor_rollout_ref.rollout.n)

    def _timing_metrics(self, rows: Rows, seconds: dict[str, float]) -> dict[str, float]:
        n_gpus = self.resource_pool_manager.get_n_gpus()
        names = ("responses", "attention_mask")
        lengths = {"global_token_num": rows.lengths or [0]}
        of_verl = DataProto.from_dict(
            tensors={name: rows.tensors[name] for name in names}, meta_info=lengths
        )
        metrics: dict[str, float] = compute_timing_metrics(batch=of_verl, timing_raw=seconds)
        if "gen" in seconds and "sampled" in rows.tensors:  # verl counts context tokens, too
            n_sampled = max(1, int(rows.tensors["sampled"].sum()))
            metrics["timing_per_token_ms/gen"] = seconds["gen"] * 1000 / n_sampled
        metrics.update(compute_throughout_metrics(of_verl, timing_raw=seconds, n_gpus=n_gpus))
        return metrics


@contextmanager
def standalone_servers() -> Iterator[None]:
    """Let verl start its servers on a resource pool of their own, `rollout.nnodes` machines.

    Monkeypatch of `verl.trainer.ppo.ray_trainer.LLMServerManager` (verl 0.9.1), which
    `RayPPOTrainer.init_workers` always creates on the actor's worker group, although the class can
    start standalone replicas. Obsolete with the first verl whose trainer passes the choice on. Not
    run on GPUs yet.
    """

    class Standalone(ray_trainer.LLMServerManager):
        @classmethod
        def create(cls, config: DictConfig, **_: Any) -> Any:
            return super().create(config=config)

    original = ray_trainer.LLMServerManager
    ray_trainer.LLMServerManager = Standalone
    try:
        yield
    finally:
        ray_trainer.LLMServerManager = original


def _accepted_keywords(daemon_cls: type[Any], keywords: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(daemon_cls).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return keywords
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in keywords.items() if name in names}
