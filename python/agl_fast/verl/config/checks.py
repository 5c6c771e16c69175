"""Checks of a composed configuration that hold on every machine, in the order of `CHECKS`.

`compose` runs them. `agl_fast.verl.preflight` adds those that need this machine or the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Annotated, Any, Literal

import torch
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from pydantic import Field
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils.config import validate_config
from verl.utils.tracking import Tracking
from verl.workers.config.optimizer import build_optimizer

from agl_fast.rows.levels import Level
from agl_fast.training.credit import load_hook
from agl_fast.training.losses.policy_losses import OF_ROLLOUTS, REFUSED
from agl_fast.training.losses.units import Aggregation
from agl_fast.verl.addresses import is_loopback
from agl_fast.verl.config.collection import check_collection
from agl_fast.verl.config.key_checks import check_value
from agl_fast.verl.config.schema import (
    Count,
    Finite,
    Fraction,
    NonNegative,
    NonNegativeCount,
    Positive,
    PositiveFraction,
    Range,
)

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
TopK = Annotated[int, Field(ge=-1), Range("-1 or 0 for all tokens, or at least 1")]
# PyTorch scales gradients by it: 0 would train nothing, a negative one turns every update around.
MaxNorm = Annotated[
    float,
    Field(gt=0),
    Range("a number above 0, the largest norm of the gradients (1e9 does not clip)"),
]
DualClip = Annotated[
    float, Field(gt=1, allow_inf_nan=False), Range("a finite number above 1, dual-clip PPO's bound")
]
WarmupSteps = Annotated[int, Field(ge=-1), Range("at least 0, or -1 for lr_warmup_steps_ratio")]
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
            f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
            f"{ACTOR}.loss_scale_factor",
            f"{ACTOR}.ulysses_sequence_parallel_size",
            "algorithm.kl_ctrl.horizon",
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
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
            "trainer.total_training_steps",
        ),
    ),
    (NonNegativeCount, ("actor_rollout_ref.model.lora_rank", "critic.model.lora_rank")),
    (TopK, (f"{ROLLOUT}.top_k", f"{ROLLOUT}.val_kwargs.top_k")),
    (MaxNorm, (f"{ACTOR}.optim.clip_grad", "critic.optim.clip_grad")),
    (DualClip, (f"{ACTOR}.clip_ratio_c",)),
    (WarmupSteps, (f"{ACTOR}.optim.lr_warmup_steps", "critic.optim.lr_warmup_steps")),
    (
        Positive,
        (
            f"{ACTOR}.tau_neg",
            f"{ACTOR}.tau_pos",
            f"{ROLLOUT}.temperature",  # the actor divides logits by it
            "actor_rollout_ref.model.lora_alpha",  # 0: an adapter without effect
            "algorithm.kl_ctrl.target_kl",
            "critic.cliprange_value",
            "critic.model.lora_alpha",
        ),
    ),
    (Finite, (f"{ACTOR}.entropy_coeff",)),
    (
        Fraction,
        (
            f"{ACTOR}.optim.lr_warmup_steps_ratio",
            "algorithm.gamma",
            "algorithm.lam",
            "critic.optim.lr_warmup_steps_ratio",
        ),
    ),
    (
        int | None,
        ("data.seed", "trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep"),
    ),
    (
        str | None,
        ("trainer.default_hdfs_dir", "trainer.resume_from_path", "trainer.rollout_data_dir"),
    ),
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
            f"{ACTOR}.kl_loss_coef",
            f"{ACTOR}.optim.lr",
            f"{ACTOR}.optim.weight_decay",
            f"{ROLLOUT}.val_kwargs.temperature",
            "algorithm.kl_ctrl.kl_coef",
            "critic.optim.lr",
        ),
    ),
    (Literal["auto", "disable", "resume_path"], ("trainer.resume_mode",)),
    (Literal["fixed", "adaptive"], ("algorithm.kl_ctrl.type",)),
    (KlEstimate, (f"{ACTOR}.kl_loss_type", "algorithm.kl_penalty")),
)
# Agent-lightning's default.
HEARTBEAT_SECONDS = 10.0
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
        _check_optimizer(config, f"{part}.optim")


def _check_optimizer(config: DictConfig, key: str) -> None:
    """Make an optimizer, as the workers do."""
    settings = _get(config, key)
    package = settings.optimizer_impl.partition(".")[0]
    if not package or find_spec(package) is None:
        raise _unexpected(config, f"{key}.optimizer_impl", "a module that can be imported")
    if settings.optimizer_impl != "torch.optim":
        return  # another one may need a GPU
    if not isinstance(getattr(torch.optim, settings.optimizer, None), type):
        raise _unexpected(config, f"{key}.optimizer", "a class of torch.optim")
    try:
        build_optimizer([torch.nn.Parameter(torch.zeros(1))], settings)
    except (TypeError, ValueError, IndexError) as error:
        names = ("optimizer", "betas", "override_optimizer_config")
        given = ", ".join(f"{key}.{name}={_get(config, f'{key}.{name}')}" for name in names)
        raise ValueError(
            f"{given}: expected arguments of torch.optim.{settings.optimizer}: {error}"
        ) from error


def check_warm_up(config: DictConfig) -> None:
    """Without a critic, the steps of its warm-up would train nothing."""
    if config.trainer.critic_warmup > 1 and not config.critic.enable:
        raise _unexpected(
            config,
            "trainer.critic_warmup",
            "0, as the run has no critic to warm up: the actor would not be trained before",
        )


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
    for key in (
        f"{ROLLOUT}.tensor_model_parallel_size",
        f"{ACTOR}.ulysses_sequence_parallel_size",
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
    ):
        if gpus % _get(config, key):
            raise _unexpected(
                config, key, f"a divisor of trainer.nnodes × trainer.n_gpus_per_node = {gpus}"
            )
    proxy = config.agentlightning.proxy
    if not is_loopback(proxy.host) and not proxy.api_key:
        raise ValueError(
            f"agentlightning.proxy.host={proxy.host!r}: expected agentlightning.proxy.api_key to "
            "be set as well, as others can reach the server"
        )


def check_limits(config: DictConfig) -> list[str]:
    """Limits that are allowed and that healthy rollouts or ordinary prompts exceed."""
    lines = []
    silent = config.agentlightning.runner_silent_seconds
    if silent is not None and silent <= HEARTBEAT_SECONDS:
        lines.append(
            f"agentlightning.runner_silent_seconds={silent}: Agent-lightning's runners send a "
            f"heartbeat every {HEARTBEAT_SECONDS:g} s, so healthy ones count as dead"
        )
    rows = config.agentlightning.trace_aggregator
    total, prompt = rows.trajectory_max_total_length, rows.trajectory_max_prompt_length
    has_total_limit = "max_total_length" in Level.of(rows.level).keys
    if has_total_limit and total is not None and total <= prompt:
        lines.append(
            f"{ROWS}.trajectory_max_total_length={total}: a prompt of "
            f"{ROWS}.trajectory_max_prompt_length={prompt} tokens leaves no room for an answer"
        )
    return lines


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
    check_warm_up,
    check_checkpoints,
    check_loggers,
    check_batches,
    check_collection,
    check_max_model_len,
    check_credit,
    check_tree_rows,
    check_servers,
    check_limits,
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
