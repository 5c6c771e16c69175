"""Values that verl itself would refuse, if at all, only once Ray and the workers have started."""

from __future__ import annotations

from typing import Any, get_args

import torch
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils.tracking import Tracking

from agl_fast.training.losses.policy_losses import OF_ROLLOUTS, REFUSED
from agl_fast.training.losses.units import Aggregation

PROBABILITY_MASSES = (
    "actor_rollout_ref.rollout.top_p",
    "actor_rollout_ref.rollout.val_kwargs.top_p",
)
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
# verl's kl_penalty compares with these words and raises a bare NotImplementedError for others.
KL_ESTIMATES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
SCHEDULES = ("constant", "cosine")  # verl's FSDP engine has no other
DTYPES = ("fp32", "float32", "bf16", "bfloat16", "fp16", "float16")
RESUME_MODES = ("auto", "disable", "resume_path")


def check_choices(config: DictConfig) -> None:
    """Raise ValueError or TypeError naming a key, its value and what is expected."""
    for key in PROBABILITY_MASSES:
        if not 0 < _get(config, key) <= 1:
            raise ValueError(f"{key}={_get(config, key)!r}: expected a number above 0, at most 1")
    _require_one_of(config, "trainer.resume_mode", RESUME_MODES)
    _require_one_of(
        config,
        "actor_rollout_ref.actor.kl_loss_type",
        (*KL_ESTIMATES, *(f"{name}+" for name in KL_ESTIMATES)),
    )
    if _get(config, "actor_rollout_ref.model.external_lib") is None:
        names = {*POLICY_LOSS_REGISTRY, *OF_ROLLOUTS}
        if _get(config, LOSS_MODE) not in names:
            raise ValueError(
                f"{LOSS_MODE}={_get(config, LOSS_MODE)!r}: expected one of "
                f"{', '.join(sorted(names - REFUSED.keys()))}, or "
                "actor_rollout_ref.model.external_lib to be set to the module that registers it"
            )
    _require_one_of(config, "algorithm.kl_ctrl.type", ("fixed", "adaptive"))
    _require_one_of(
        config,
        "algorithm.kl_penalty",
        (*KL_ESTIMATES, *(f"{name}+" for name in KL_ESTIMATES)),
    )
    _check_engines(config)
    _check_checkpoints(config)
    _check_loggers(config)
    _check_steps(config)


def _check_engines(config: DictConfig) -> None:
    engines = {"actor_rollout_ref.actor": "fsdp_config"}
    if config.critic.enable:
        engines["critic"] = "fsdp"
        _require_one_of(config, "critic.loss_agg_mode", get_args(Aggregation))
    for part, engine in engines.items():
        _require_one_of(config, f"{part}.optim.lr_scheduler_type", SCHEDULES)
        _require_one_of(config, f"{part}.{engine}.model_dtype", DTYPES)
        implementation = _get(config, f"{part}.optim.optimizer_impl")
        optimizer = _get(config, f"{part}.optim.optimizer")
        if implementation == "torch.optim" and not hasattr(torch.optim, optimizer):
            raise ValueError(
                f"{part}.optim.optimizer={optimizer!r}: expected a class of torch.optim"
            )


def _check_checkpoints(config: DictConfig) -> None:
    trainer = config.trainer
    path = trainer.resume_from_path
    if trainer.resume_mode == "resume_path" and not (path and "global_step_" in str(path)):
        raise ValueError(
            f"trainer.resume_from_path={path!r}: expected a folder global_step_N, as "
            "trainer.resume_mode is resume_path"
        )
    if trainer.default_hdfs_dir is not None and trainer.resume_mode != "disable":
        raise ValueError(
            f"trainer.default_hdfs_dir={trainer.default_hdfs_dir!r}: expected null, or "
            "trainer.resume_mode=disable, as verl 0.9.1 loads no checkpoint from hdfs"
        )


def _check_loggers(config: DictConfig) -> None:
    key = "trainer.logger"
    value = _get(config, key)
    known = (*Tracking.supported_backend, "tracking")
    for name in [value] if isinstance(value, str) else value:
        if name not in known:
            given = value if isinstance(value, str) else list(value)
            raise ValueError(f"{key}={given!r}: expected some of {', '.join(known)}, not {name!r}")


def _check_steps(config: DictConfig) -> None:
    key = "trainer.total_training_steps"
    steps = _get(config, key)
    if steps is None:
        return
    if not isinstance(steps, int) or isinstance(steps, bool):
        raise TypeError(f"{key}={steps!r}: expected int or null, got {type(steps).__name__}")
    if steps < 1:
        raise ValueError(f"{key}={steps!r}: expected at least 1, or null for whole epochs")


def _require_one_of(config: DictConfig, key: str, choices: tuple[str, ...]) -> None:
    if _get(config, key) not in choices:
        raise ValueError(f"{key}={_get(config, key)!r}: expected one of {', '.join(choices)}")


def _get(config: DictConfig, key: str) -> Any:
    return OmegaConf.select(config, key)
