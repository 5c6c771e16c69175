"""`VERL`: train the model behind an Agent-lightning agent with verl."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Mapping, Sized
from typing import Any

from agentlightning.algorithm import Algorithm
from agentlightning.client import AgentLightningClient
from agentlightning.execution import SharedMemoryExecutionStrategy
from agentlightning.types import LLM
from omegaconf import DictConfig

from agl_fast.training.datasets import Samples
from agl_fast.verl.addresses import routable_address, url_host
from agl_fast.verl.agentlightning_patches import patch_agentlightning
from agl_fast.verl.config import decide_with_model, merge_settings
from agl_fast.verl.membership import bind_runners_to_runs
from agl_fast.verl.supervision.log_output import messages_shown

logger = logging.getLogger(__name__)

# Here, because runner processes are forked from the one that makes the algorithm.
patch_agentlightning()


class VERL(Algorithm):
    """Reinforcement learning with verl's trainer, FSDP and vLLM.

    Takes the place of `agentlightning.algorithm.verl.VERL`, with the same arguments::

        algorithm = VERL({
            "algorithm": {"adv_estimator": "grpo"},
            "data": {"train_batch_size": 32},
            "actor_rollout_ref": {
                "model": {"path": "Qwen/Qwen2.5-1.5B-Instruct"},
                "rollout": {"n": 4, "log_prob_micro_batch_size_per_gpu": 4},
                "actor": {"ppo_mini_batch_size": 32, "ppo_micro_batch_size_per_gpu": 4},
            },
            "agentlightning": {"trace_aggregator": {"level": "trajectory"}},
        })
        agentlightning.Trainer(algorithm=algorithm, n_runners=8).fit(
            agent, train_dataset=tasks, val_dataset=more_tasks
        )

    Agents find the policy as the resource `main_llm`; it is the only one. Other models, such as a
    judge, are called under their own address.

    Agent-lightning's default strategy (client-server) runs every runner in a process of its own
    and the algorithm in the main one. With the strategy `shm` there can be one runner only, as
    Agent-lightning's tracer follows one rollout at a time in a process; give it
    `main_thread="algorithm"` too, because a thread cannot be interrupted when a server dies.

    Without a store, or with `agentlightning.mode=v0`, agents ask a server on `agentlightning.port`
    for tasks (Agent-lightning's legacy mode v0, deprecated): see `get_client`.

    Args:
        config: laid over verl's `ppo_trainer` defaults and agl_fast's own `config.yaml`, which
            explains the keys of agl_fast itself. A key that neither has is written with a plus
            before its name. Keys of verl 0.6.1 that have another name now are moved there. On a
            machine without an accelerator, what that needs is filled in where it is not set.
        trainer_cls: takes the place of `agl_fast.AgentLightningTrainer`.
        daemon_cls: takes the place of `agl_fast.AgentModeDaemon`.

    Attributes:
        config: the whole configuration.
        notices: lines about it (keys that moved, values that were filled in), logged by `run`.

    Raises:
        TypeError: a setting, or `config` itself, has the wrong type.
        ValueError: a setting cannot work, or there is no model. Both name the key, its value
            and what is expected.
    """

    config: DictConfig

    def __init__(
        self,
        config: Mapping[str, Any],
        trainer_cls: type[Any] | None = None,
        daemon_cls: type[Any] | None = None,
    ) -> None:
        super().__init__()
        merged = merge_settings(config)
        self.config = merged.config
        self._open_keys = merged.open_keys
        # Only now: its imports decide verl's device where nothing has yet.
        from agl_fast.verl.preflight import check_run

        self.notices = merged.lines + check_run(self.config)
        if daemon_cls is not None:
            _require_credit(self.config, daemon_cls)
        self.trainer_cls = trainer_cls
        self.daemon_cls = daemon_cls

    @messages_shown()
    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        """Train until the configured steps or epochs are done.

        Args:
            train_dataset: samples by index, with a length.
            val_dataset: likewise; None: the run does not validate.

        Raises:
            TypeError: a dataset is a mapping, or has no length, or its first sample has no fields.
            ValueError: there are fewer samples than `data.train_batch_size`, or nothing to
                validate on though `trainer.val_only` is set; there are several LLMs, or several
                runners in one process; the mode is v1 and there is no store.
            OSError: the mode is v0, and `agentlightning.port` is taken.
        """
        config = self.config.copy()
        _require_samples(config, train_dataset)
        notices = list(self.notices)
        if self._open_keys is not None:
            notices += decide_with_model(config, self._open_keys)
        for line in notices:
            logger.info("%s", line)
        is_legacy = self._is_legacy()
        if not is_legacy:
            _require_one_llm(self.get_initial_resources() or {})
            if self._trainer_ref is not None:
                _require_one_runner_a_process(self.get_trainer().strategy)
        if val_dataset is not None:
            _require_a_length("val_dataset", val_dataset)
            if len(val_dataset):
                Samples(val_dataset)[0]  # raises TypeError for another kind of sample
        if val_dataset is None or len(val_dataset) == 0:
            _do_not_validate(config)
            logger.info("there is no val_dataset, so the run does not validate")
            val_dataset = None

        # Only now: Ray, the trainer and the proxy are nothing to whoever only configures.
        from agl_fast.verl.entrypoint import run

        run(
            config=config,
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            store=None if is_legacy else self.get_store(),
            llm_proxy=None if is_legacy else self.get_llm_proxy(),
            adapter=None if is_legacy else self.get_adapter(),
            trainer_cls=self.trainer_cls,
            daemon_cls=self.daemon_cls,
        )

    def get_client(self) -> AgentLightningClient:
        """A client of the server that a run in mode v0 serves on `agentlightning.port`.

        It takes tasks and posts rollouts, whose triplets must carry token ids: there, no call names
        its rollout. Deprecated since Agent-lightning 0.2; run agents in an
        `agentlightning.Trainer`.
        """
        warnings.warn(
            "VERL.get_client is deprecated: run the agent in an agentlightning.Trainer, which "
            "brings a store",
            DeprecationWarning,
            stacklevel=2,
        )
        ours = self.config.agentlightning
        host = ours.proxy.advertise_host or routable_address(ours.proxy.host)
        return AgentLightningClient(endpoint=f"http://{url_host(host)}:{ours.port}")

    def _is_legacy(self) -> bool:
        mode = self.config.agentlightning.mode
        if mode is None:
            return self._store is None
        return bool(mode == "v0")


bind_runners_to_runs(lambda algorithm: isinstance(algorithm, VERL))


def _require_credit(config: DictConfig, daemon_cls: type[Any]) -> None:
    ours = config.agentlightning
    if ours.rollout_hook is None and ours.credit == "identical":
        return
    parameters = inspect.signature(daemon_cls).parameters.values()
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    if not takes_all and "credit" not in {each.name for each in parameters}:
        raise TypeError(
            f"agentlightning.rollout_hook={ours.rollout_hook!r} and credit={ours.credit!r} need a "
            f"daemon that takes `credit`: {daemon_cls!r} does not"
        )


def _require_samples(config: DictConfig, train_dataset: Any) -> None:
    if train_dataset is None:
        raise ValueError("train_dataset is None: expected samples, as data.train_files is not read")
    _require_a_length("train_dataset", train_dataset)
    batch_size = config.data.train_batch_size
    if len(train_dataset) < batch_size:
        raise ValueError(
            f"train_dataset has {len(train_dataset)} samples: expected at least "
            f"data.train_batch_size={batch_size}"
        )
    if "data_id" in Samples(train_dataset)[0]:
        print("agl_fast: samples have a column data_id: agents get the run's own id in its place")


def _require_a_length(name: str, dataset: Any) -> None:
    if isinstance(dataset, Mapping) or not isinstance(dataset, Sized):
        raise TypeError(
            f"{name} is of type {type(dataset).__name__}: expected samples by index, with a "
            "length, such as a list"
        )


def _require_one_llm(initial_resources: Mapping[str, Any]) -> None:
    others = [
        name
        for name, resource in initial_resources.items()
        if isinstance(resource, LLM) and name != "main_llm"
    ]
    if others:
        raise ValueError(
            f"initial_resources has the LLMs {', '.join(others)}: expected none, as one model is "
            "trained, main_llm; agents call other models under their own address"
        )
    if initial_resources:
        logger.info(
            "initial_resources (%s) are not passed on: rollouts get main_llm alone, as in "
            "Agent-lightning 0.3",
            ", ".join(initial_resources),
        )


def _require_one_runner_a_process(strategy: Any) -> None:
    if isinstance(strategy, SharedMemoryExecutionStrategy) and strategy.n_runners > 1:
        raise ValueError(
            f"strategy='shm' with n_runners={strategy.n_runners}: expected n_runners=1, or the "
            "default strategy, as Agent-lightning's tracer follows one rollout at a time in a "
            "process"
        )


def _do_not_validate(config: DictConfig) -> None:
    if config.trainer.val_only:
        raise ValueError("trainer.val_only=True: expected a val_dataset")
    config.trainer.val_before_train = False
    config.trainer.test_freq = -1
