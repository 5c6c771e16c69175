"""Settings that cannot work together, found before Ray starts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from omegaconf import DictConfig, OmegaConf

from agl_fast.rows.levels import Level
from agl_fast.training.credit import load_hook
from agl_fast.verl.addresses import is_loopback
from agl_fast.verl.config.own_keys import DeadlineKeys

AT_LEAST_ONE = (
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor_rollout_ref.actor.ppo_epochs",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.max_model_len",
    "actor_rollout_ref.rollout.max_num_batched_tokens",
    "actor_rollout_ref.rollout.max_num_seqs",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.val_kwargs.n",
    "data.val_batch_size",
    "trainer.nnodes",
    "trainer.total_epochs",
    "trainer.n_gpus_per_node",
    "agentlightning.max_ppo_update_times",
    "agentlightning.proxy.max_body_bytes",
    "agentlightning.proxy.max_header_bytes",
    "agentlightning.proxy.max_connections",
    "agentlightning.trace_aggregator.trajectory_max_prompt_length",
    "agentlightning.trace_aggregator.trajectory_max_response_length",
    "agentlightning.trace_aggregator.trajectory_max_total_length",
    "agentlightning.trace_aggregator.tree_max_tokens",
)
ABOVE_ZERO = (
    *(f"agentlightning.deadlines.{field.name}" for field in fields(DeadlineKeys)),
    "agentlightning.llm_timeout_seconds",
    "agentlightning.rollout_deadline_seconds",
    "agentlightning.runner_silent_seconds",
    "agentlightning.first_runner_seconds",
    "agentlightning.proxy.move_after_seconds",
    "agentlightning.proxy.header_seconds",
    "agentlightning.proxy.body_seconds",
    "actor_rollout_ref.rollout.temperature",  # the actor divides logits by it
)
SHARES = ("actor_rollout_ref.rollout.gpu_memory_utilization",)
AT_LEAST_ZERO = (
    "agentlightning.max_empty_steps",
    "actor_rollout_ref.actor.clip_ratio",
    "actor_rollout_ref.actor.clip_ratio_high",
    "actor_rollout_ref.actor.clip_ratio_low",
    "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.optim.weight_decay",
    "algorithm.kl_ctrl.kl_coef",
    "critic.optim.lr",
)
MAX_MODEL_LEN = "actor_rollout_ref.rollout.max_model_len"
PORTS = ("agentlightning.port", "agentlightning.store_port", "agentlightning.proxy.port")
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


def check_combinations(config: DictConfig) -> list[str]:
    """Raise ValueError naming a key, its value and what is expected.

    Returns:
        One line for each setting that is allowed and does nothing, or less than it seems.
    """
    for key in AT_LEAST_ONE:
        value = _get(config, key)
        if value is not None and value < 1:
            raise _unexpected(config, key, "at least 1")
    for key in AT_LEAST_ZERO:
        if not 0 <= _get(config, key) < math.inf:
            raise _unexpected(config, key, "a finite number, at least 0")
    for key in ABOVE_ZERO:
        value = _get(config, key)
        if value is not None and not 0 < value < math.inf:
            raise _unexpected(config, key, "a finite number above 0")
    for key in PORTS:
        value = _get(config, key)
        if value is not None and not 0 <= value <= 65535:
            raise _unexpected(config, key, "a port from 0 to 65535")
    if not math.isfinite(_get(config, "agentlightning.reward_fillna_value")):
        raise _unexpected(config, "agentlightning.reward_fillna_value", "a finite number")
    for key in SHARES:
        value = _get(config, key)
        if not 0 < value <= 1:
            raise _unexpected(config, key, "a number above 0, at most 1")
    _check_batch(config)
    check_context(config, config.actor_rollout_ref.rollout.max_model_len, MAX_MODEL_LEN)
    _check_credit(config)
    _check_trees(config)
    _check_servers(config)
    return [*_without_effect(config), *_calls_too_long_for_trees(config)]


def _check_batch(config: DictConfig) -> None:
    key = "actor_rollout_ref.actor.ppo_mini_batch_size"
    if _get(config, key) > config.data.train_batch_size:
        raise _unexpected(
            config, key, f"at most data.train_batch_size={config.data.train_batch_size}"
        )


def check_context(config: DictConfig, context: int | None, named: str) -> None:
    """Raise ValueError where the servers' context holds less than the limits of calls and rows.

    Args:
        context: tokens of a prompt and its answer; None: unknown.
        named: the key, or what else says so.
    """
    if context is None:
        return
    data, rows = config.data, config.agentlightning.trace_aggregator
    ours = "agentlightning.trace_aggregator"
    needed, keys = {
        "transition": (
            data.max_prompt_length + data.max_response_length,
            "data.max_prompt_length + data.max_response_length",
        ),
        "trajectory": (
            rows.trajectory_max_prompt_length + 1,
            f"{ours}.trajectory_max_prompt_length + 1",
        ),
        "tree": (data.max_response_length + 1, "data.max_response_length + 1"),
    }[rows.level]
    if context < needed:
        raise ValueError(
            f"{named}={context}: expected at least {keys} = {needed}, or smaller limits, as vLLM "
            "refuses every call that does not fit"
        )
    if context <= data.max_response_length:
        raise ValueError(
            f"{named}={context}: expected more than data.max_response_length="
            f"{data.max_response_length}, as an answer of that length leaves no room for a prompt"
        )


def _check_credit(config: DictConfig) -> None:
    ours = config.agentlightning
    if ours.rollout_hook is not None:
        load_hook(ours.rollout_hook)
    if not 0 <= ours.credit_discount <= 1:
        raise _unexpected(config, "agentlightning.credit_discount", "a number from 0 to 1")
    if ours.credit != "identical" and not config.algorithm.enable_rollout_level_advantage:
        raise _unexpected(
            config,
            "agentlightning.credit",
            "'identical' where algorithm.enable_rollout_level_advantage=false, as rows have no "
            "credit",
        )


def _check_trees(config: DictConfig) -> None:
    aggregator = config.agentlightning.trace_aggregator
    if not Level.of(aggregator.level).is_tree:
        return
    if not config.algorithm.enable_rollout_level_advantage:
        raise _unexpected(
            config,
            "algorithm.enable_rollout_level_advantage",
            "true at level 'tree', as the tokens of a row are not one sequence",
        )


def _calls_too_long_for_trees(config: DictConfig) -> Iterator[str]:
    aggregator = config.agentlightning.trace_aggregator
    longest = config.data.max_prompt_length + config.data.max_response_length
    if Level.of(aggregator.level).is_tree and longest > aggregator.tree_max_tokens:
        yield (
            f"agentlightning.trace_aggregator.tree_max_tokens={aggregator.tree_max_tokens}: calls "
            f"may have up to data.max_prompt_length + data.max_response_length = {longest} tokens; "
            "longer ones than tree_max_tokens are sampled and not trained"
        )


def _check_servers(config: DictConfig) -> None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.max_num_batched_tokens < rollout.max_num_seqs:
        raise _unexpected(
            config,
            "actor_rollout_ref.rollout.max_num_batched_tokens",
            f"at least actor_rollout_ref.rollout.max_num_seqs={rollout.max_num_seqs}, as vLLM asks",
        )
    gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
    key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
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


def _without_effect(config: DictConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    for name, neutral in (("top_p", 1), ("top_k", -1)):
        value = rollout[name]
        if value not in (neutral, 0 if name == "top_k" else 1):
            yield (
                f"actor_rollout_ref.rollout.{name}={value}: training samples from fewer tokens "
                "than the actor's log-probs count, so servers and actor differ at every token; "
                f"{name}={neutral} samples what is trained"
            )
    correction = config.algorithm.get("rollout_correction") or {}
    if correction.get("bypass_mode") and correction.get("rollout_is") is not None:
        yield (
            "algorithm.rollout_correction.rollout_is does nothing with bypass_mode: the loss's "
            "ratio is the correction"
        )
    estimator, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    if estimator in GROUP_ESTIMATORS and n < 2:
        yield (
            f"actor_rollout_ref.rollout.n={n} with algorithm.adv_estimator={estimator}: a rollout "
            "has no others to be compared with, so every advantage is 0"
        )


def _get(config: DictConfig, key: str) -> Any:
    return OmegaConf.select(config, key)


def _unexpected(config: DictConfig, key: str, expected: str) -> ValueError:
    return ValueError(f"{key}={_get(config, key)!r}: expected {expected}")
