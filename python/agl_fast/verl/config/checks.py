"""Checks of a composed configuration that hold on every machine, in the order of `CHECKS`.

`compose` runs them. `agl_fast.verl.preflight` adds those that need this machine or the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils.config import validate_config
from verl.utils.tracking import Tracking

from agl_fast.rows.levels import Level
from agl_fast.training.credit import load_hook
from agl_fast.training.losses.policy_losses import OF_ROLLOUTS, REFUSED
from agl_fast.training.losses.units import Aggregation
from agl_fast.verl.addresses import is_loopback
from agl_fast.verl.config.collection import check_collection
from agl_fast.verl.config.key_checks import check_value
from agl_fast.verl.config.schema import Count, NonNegative, Positive, PositiveFraction

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
ROWS = "agentlightning.trace_aggregator"
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
DYNAMIC_BATCHES = f"{ACTOR}.use_dynamic_bsz"
DYNAMIC_LOG_PROBS = f"{ROLLOUT}.log_prob_use_dynamic_bsz"

# verl's kl_penalty compares with these words and raises a bare NotImplementedError for others.
KlEstimate = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+",
]  # fmt: skip
Schedule = Literal["constant", "cosine"]  # verl's FSDP engine has no other
Dtype = Literal["fp32", "float32", "bf16", "bfloat16", "fp16", "float16"]
# Ranges and choices of verl's keys that verl itself checks late or not at all.
VALUES: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (
        Count,
        (
            "data.train_batch_size",
            "data.max_prompt_length",
            "data.max_response_length",
            f"{ACTOR}.ppo_epochs",
            f"{ACTOR}.ppo_max_token_len_per_gpu",
            f"{ACTOR}.ppo_mini_batch_size",
            f"{ROLLOUT}.max_num_batched_tokens",
            f"{ROLLOUT}.max_num_seqs",
            f"{ROLLOUT}.n",
            f"{ROLLOUT}.tensor_model_parallel_size",
            f"{ROLLOUT}.val_kwargs.n",
            "trainer.nnodes",
            "trainer.total_epochs",
            "trainer.n_gpus_per_node",
        ),
    ),
    (
        Count | None,
        (
            "data.val_batch_size",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu",
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
            f"{ROLLOUT}.max_model_len",
            "trainer.total_training_steps",
        ),
    ),
    (Positive, (f"{ROLLOUT}.temperature",)),  # the actor divides logits by it
    (
        PositiveFraction,
        (
            f"{ROLLOUT}.gpu_memory_utilization",
            f"{ROLLOUT}.top_p",
            f"{ROLLOUT}.val_kwargs.top_p",
        ),
    ),
    (
        NonNegative,
        (
            f"{ACTOR}.clip_ratio",
            f"{ACTOR}.clip_ratio_high",
            f"{ACTOR}.clip_ratio_low",
            f"{ACTOR}.optim.lr",
            f"{ACTOR}.optim.weight_decay",
            "algorithm.kl_ctrl.kl_coef",
            "critic.optim.lr",
        ),
    ),
    (Literal["auto", "disable", "resume_path"], ("trainer.resume_mode",)),
    (Literal["fixed", "adaptive"], ("algorithm.kl_ctrl.type",)),
    (KlEstimate, (f"{ACTOR}.kl_loss_type", "algorithm.kl_penalty")),
)
# With these, a rollout is better or worse than others of its sample.
GROUP_ESTIMATORS = (
    "gdpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "grpo_vectorized",
    "opo",
    "optimal_token_baseline",
    "reinforce_plus_plus_baseline",
    "rloo",
    "rloo_vectorized",
    "tir_optimal_token_baseline",
)


def check_values(config: DictConfig) -> None:
    """Ranges and choices of verl's keys."""
    for hint, keys in VALUES:
        for key in keys:
            check_value(key, _get(config, key), hint)


def check_loss_mode(config: DictConfig) -> None:
    if _get(config, "actor_rollout_ref.model.external_lib") is not None:
        return  # the module may register it
    names = {*POLICY_LOSS_REGISTRY, *OF_ROLLOUTS}
    if _get(config, LOSS_MODE) not in names:
        raise ValueError(
            f"{LOSS_MODE}={_get(config, LOSS_MODE)!r}: expected one of "
            f"{', '.join(sorted(names - REFUSED.keys()))}, or "
            "actor_rollout_ref.model.external_lib to be set to the module that registers it"
        )


def check_engines(config: DictConfig) -> None:
    """Choices that only verl's workers look up: schedule, precision, optimizer."""
    engines = {ACTOR: "fsdp_config"}
    if config.critic.enable:
        engines["critic"] = "fsdp"
        check_value("critic.loss_agg_mode", config.critic.loss_agg_mode, Aggregation)
    for part, engine in engines.items():
        for key, hint in (
            (f"{part}.optim.lr_scheduler_type", Schedule),
            (f"{part}.{engine}.model_dtype", Dtype),
        ):
            check_value(key, _get(config, key), hint)
        implementation = _get(config, f"{part}.optim.optimizer_impl")
        optimizer = _get(config, f"{part}.optim.optimizer")
        if implementation == "torch.optim" and not hasattr(torch.optim, optimizer):
            raise _unexpected(config, f"{part}.optim.optimizer", "a class of torch.optim")


def check_checkpoints(config: DictConfig) -> None:
    trainer = config.trainer
    path = trainer.resume_from_path
    if trainer.resume_mode == "resume_path" and not (path and "global_step_" in str(path)):
        raise _unexpected(
            config,
            "trainer.resume_from_path",
            "a folder global_step_N, as trainer.resume_mode is resume_path",
        )
    if trainer.default_hdfs_dir is not None and trainer.resume_mode != "disable":
        raise _unexpected(
            config,
            "trainer.default_hdfs_dir",
            "null, or trainer.resume_mode=disable, as verl 0.9.1 loads no checkpoint from hdfs",
        )


def check_loggers(config: DictConfig) -> None:
    key = "trainer.logger"
    value = _get(config, key)
    known = (*Tracking.supported_backend, "tracking")
    for name in [value] if isinstance(value, str) else value:
        if name not in known:
            given = value if isinstance(value, str) else list(value)
            raise ValueError(f"{key}={given!r}: expected some of {', '.join(known)}, not {name!r}")


def check_batches(config: DictConfig) -> None:
    if config.actor_rollout_ref.actor.ppo_mini_batch_size > config.data.train_batch_size:
        raise _unexpected(
            config,
            f"{ACTOR}.ppo_mini_batch_size",
            f"at most data.train_batch_size={config.data.train_batch_size}",
        )
    wanted, found = _get(config, DYNAMIC_BATCHES), _get(config, DYNAMIC_LOG_PROBS)
    if wanted != found:  # verl's worker would end with an assertion, with Ray and the model loaded
        raise ValueError(
            f"{DYNAMIC_LOG_PROBS}={found}: expected {wanted}, as {DYNAMIC_BATCHES}={wanted}: verl "
            "0.9.1 has one engine for the actor's log-probs and its updates"
        )


def check_max_model_len(config: DictConfig) -> None:
    require_context(config, _get(config, f"{ROLLOUT}.max_model_len"), f"{ROLLOUT}.max_model_len")


def require_context(config: DictConfig, context: int | None, source: str) -> None:
    """Raise ValueError if the servers' context is shorter than the limits of calls and rows.

    Args:
        context: maximum number of tokens of a prompt and its answer; None: unknown.
        source: the key or file that sets it, for the message.
    """
    if context is None:
        return
    data, rows = config.data, config.agentlightning.trace_aggregator
    needed, keys = {
        "transition": (
            data.max_prompt_length + data.max_response_length,
            "data.max_prompt_length + data.max_response_length",
        ),
        "trajectory": (
            rows.trajectory_max_prompt_length + 1,
            f"{ROWS}.trajectory_max_prompt_length + 1",
        ),
        "tree": (data.max_response_length + 1, "data.max_response_length + 1"),
    }[rows.level]
    if context < needed:
        raise ValueError(
            f"{source}={context}: expected at least {keys} = {needed}, or smaller limits, as vLLM "
            "refuses every call that does not fit"
        )
    if context <= data.max_response_length:
        raise ValueError(
            f"{source}={context}: expected more than data.max_response_length="
            f"{data.max_response_length}, as an answer of that length leaves no room for a prompt"
        )


def check_credit(config: DictConfig) -> None:
    ours = config.agentlightning
    if ours.rollout_hook is not None:
        load_hook(ours.rollout_hook)
    if ours.credit != "identical" and not config.algorithm.enable_rollout_level_advantage:
        raise _unexpected(
            config,
            "agentlightning.credit",
            "'identical' where algorithm.enable_rollout_level_advantage=false, as rows have no "
            "credit",
        )


def check_tree_rows(config: DictConfig) -> list[str]:
    rows = config.agentlightning.trace_aggregator
    if not Level.of(rows.level).is_tree:
        return []
    if not config.algorithm.enable_rollout_level_advantage:
        raise _unexpected(
            config,
            "algorithm.enable_rollout_level_advantage",
            "true at level 'tree', as the tokens of a row are not one sequence",
        )
    longest = config.data.max_prompt_length + config.data.max_response_length
    if longest <= rows.tree_max_tokens:
        return []
    return [
        f"{ROWS}.tree_max_tokens={rows.tree_max_tokens}: calls may have up to "
        f"data.max_prompt_length + data.max_response_length = {longest} tokens; longer ones than "
        "tree_max_tokens are sampled and not trained"
    ]


def check_servers(config: DictConfig) -> None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.max_num_batched_tokens < rollout.max_num_seqs:
        raise _unexpected(
            config,
            f"{ROLLOUT}.max_num_batched_tokens",
            f"at least {ROLLOUT}.max_num_seqs={rollout.max_num_seqs}, as vLLM asks",
        )
    gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if gpus % rollout.tensor_model_parallel_size:
        raise _unexpected(
            config,
            f"{ROLLOUT}.tensor_model_parallel_size",
            f"a divisor of trainer.nnodes × trainer.n_gpus_per_node = {gpus}",
        )
    proxy = config.agentlightning.proxy
    if not is_loopback(proxy.host) and not proxy.api_key:
        raise ValueError(
            f"agentlightning.proxy.host={proxy.host!r}: expected agentlightning.proxy.api_key to "
            "be set as well, as others can reach the server"
        )


def check_sampling(config: DictConfig) -> list[str]:
    """Sampling from fewer tokens than the actor's distribution has is allowed, and reported."""
    rollout = config.actor_rollout_ref.rollout
    return [
        f"{ROLLOUT}.{name}={rollout[name]}: training samples from fewer tokens than the actor's "
        f"log-probs count, so servers and actor differ at every token; {name}={neutral[0]} samples "
        "what is trained"
        for name, neutral in (("top_p", (1,)), ("top_k", (-1, 0)))
        if rollout[name] not in neutral
    ]


def check_advantages(config: DictConfig) -> list[str]:
    """Settings that are allowed and make a correction or every advantage void."""
    lines = []
    correction = config.algorithm.get("rollout_correction") or {}
    if correction.get("bypass_mode") and correction.get("rollout_is") is not None:
        lines.append(
            "algorithm.rollout_correction.rollout_is does nothing with bypass_mode: the loss's "
            "ratio is the correction"
        )
    estimator, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    if estimator in GROUP_ESTIMATORS and n < 2:
        lines.append(
            f"actor_rollout_ref.rollout.n={n} with algorithm.adv_estimator={estimator}: a rollout "
            "has no others to be compared with, so every advantage is 0"
        )
    return lines


def check_with_verl(config: DictConfig) -> None:
    """verl's own validation."""
    resolved = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    # verl would load the model's files to build this group; the workers load them later.
    del resolved.critic.model
    try:
        validate_config(
            config=resolved,
            use_reference_policy=needs_reference(config),
            use_critic=config.critic.enable,
        )
    except (AssertionError, ValueError, InstantiationException) as error:
        cause = error.__cause__ or error
        raise ValueError(f"verl refuses the configuration: {cause}") from error


Check = Callable[[DictConfig], list[str] | None]
# Each raises ValueError or TypeError that names key, value and expectation; the lines that it
# returns are for the user.
CHECKS: tuple[Check, ...] = (
    check_values,
    check_loss_mode,
    check_engines,
    check_checkpoints,
    check_loggers,
    check_batches,
    check_collection,
    check_max_model_len,
    check_credit,
    check_tree_rows,
    check_servers,
    check_sampling,
    check_advantages,
    check_with_verl,
)


def run_checks(config: DictConfig, checks: Iterable[Check]) -> list[str]:
    """Run checks in their order; what they report."""
    return [line for check in checks for line in check(config) or ()]


def needs_reference(config: DictConfig) -> bool:
    """Whether a KL term uses the reference policy."""
    return bool(config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss)


def _get(config: DictConfig, key: str) -> Any:
    return OmegaConf.select(config, key)


def _unexpected(config: DictConfig, key: str, expected: str) -> ValueError:
    return ValueError(f"{key}={_get(config, key)!r}: expected {expected}")
