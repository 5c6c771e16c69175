"""Defaults of micro-batches: dynamic batching, and its token limits."""

from __future__ import annotations

from collections.abc import Collection

from omegaconf import DictConfig, OmegaConf

from agl_fast.rows.levels import Level
from agl_fast.rows.options import config_keys
from agl_fast.tree.engine_name import ENGINE
from agl_fast.verl.model_files import vocabulary_size

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REFERENCE = "actor_rollout_ref.ref"
CRITIC = "critic"
ATTENTION = "attn_implementation"
SAMPLER_SWITCH = f"{ROLLOUT}.log_prob_use_dynamic_bsz"
DEFAULT_TOKENS = 16384  # per micro-batch, as in verl
# Logits of a micro-batch in bfloat16, their float32 copy, and the gradients of both: 6 GiB.
LOGIT_BYTES = 12
MOST_LOGITS = 2**29


def fill_in_batches(config: DictConfig, user_keys: Collection[str]) -> list[str]:
    """Set `use_dynamic_bsz` if the user has set neither it nor a micro-batch size.

    verl has no default for either and refuses a configuration without one. A reference or critic
    with a micro-batch size of its own keeps it.

    Args:
        config: changed in place; its `critic.enable` is decided.
        user_keys: dotted keys that the user has set.

    Returns:
        A line with the changes, if there are any.
    """
    changes: dict[str, bool | int] = {}
    if _is_open(f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_micro_batch_size", user_keys):
        changes[f"{ACTOR}.use_dynamic_bsz"] = True
        key, size = (
            f"{REFERENCE}.log_prob_use_dynamic_bsz",
            f"{REFERENCE}.log_prob_micro_batch_size",
        )
        if key not in user_keys:
            changes[key] = _is_open(key, size, user_keys)
        if SAMPLER_SWITCH not in user_keys:
            changes[SAMPLER_SWITCH] = True  # as the actor's
    switch = f"{CRITIC}.use_dynamic_bsz"
    if config.critic.enable and not {switch, f"{ACTOR}.use_dynamic_bsz"} & set(user_keys):
        changes[switch] = _is_open(switch, f"{CRITIC}.ppo_micro_batch_size", user_keys)
    said = [
        f"{key}={str(new).lower()}"
        for key, new in changes.items()
        if OmegaConf.select(config, key) != new
    ]
    for key, new in changes.items():  # unchanged ones, too: they would follow the actor's
        OmegaConf.update(config, key, new)
    if not said:
        return []
    why = "no micro-batch size is set: micro-batches are split by tokens"
    return [f"{', '.join(said)}, as {why}"]


def _is_open(switch: str, size: str, user_keys: Collection[str]) -> bool:
    return not any(key in user_keys for key in (switch, size, f"{size}_per_gpu"))


def fit_micro_batches(config: DictConfig, user_keys: Collection[str]) -> list[str]:
    """Fit the token limits of micro-batches to the longest row.

    verl would fail with an assertion at the first longer row, maybe hours into a run. A limit that
    the user has not set is raised to the longest row. If the vocabulary is known, a larger limit is
    lowered so that a micro-batch's logits fit beside a model on a small GPU.

    Args:
        config: changed in place; its switches and `critic.enable` are decided.
        user_keys: dotted keys that the user has set.

    Returns:
        A line with the changes, and one if the logits remain large.

    Raises:
        ValueError: the user's limit is shorter than a row; the message names both.
    """
    longest, named = longest_row(config)
    vocabulary = vocabulary_size(str(config.actor_rollout_ref.model.path))
    wanted = longest
    if vocabulary:
        wanted = max(longest, min(DEFAULT_TOKENS, MOST_LOGITS // vocabulary))
    said = []
    for limit, group, is_cut, source in _limits(config):
        n_ulysses = _ulysses(config, group)
        found = OmegaConf.select(config, limit)
        least = -(-longest // n_ulysses)
        if not is_cut:
            continue
        if {limit, source} & set(user_keys):
            if found < least:
                raise ValueError(f"{limit}={found}: expected at least {_needed(named, n_ulysses)}")
        elif found < least or (
            vocabulary and group != CRITIC and found * vocabulary > MOST_LOGITS and found > wanted
        ):
            OmegaConf.update(config, limit, -(-wanted // n_ulysses))
            said.append(f"{limit}={-(-wanted // n_ulysses)}")
    lines = []
    if said:
        why = f"a row may have {longest} tokens"
        if vocabulary:
            why += f" and a token {vocabulary} logits"
        lines.append(f"{', '.join(said)}, as {why}")
    return lines + _large_logits(config, vocabulary)


def longest_row(config: DictConfig) -> tuple[int, str]:
    """Maximum number of tokens of a row, and the keys that set it."""
    level = Level.of(config.agentlightning.trace_aggregator.level)
    keys = config_keys(level.name)
    total = keys.get("max_total_length")
    has_total_limit = total is not None and bool(OmegaConf.select(config, total))
    names = level.row_length_options(has_total_limit=has_total_limit)
    longest = sum(OmegaConf.select(config, keys[name]) for name in names)
    equals = "=" if len(names) == 1 else " = "
    named = f"{' + '.join(keys[name] for name in names)}{equals}{longest}"
    # A row fits into the servers' context.
    context = config.actor_rollout_ref.rollout.max_model_len
    if context is not None and context < longest:
        return context, f"{ROLLOUT}.max_model_len={context}"
    return longest, named


def _needed(named: str, n_ulysses: int) -> str:
    what = "a tree" if "tree_max_tokens" in named else "a row"
    shared = f" shared by ulysses_sequence_parallel_size={n_ulysses} GPUs" if n_ulysses > 1 else ""
    return f"{named}{shared}, as {what} is never split across micro-batches"


def _limits(config: DictConfig) -> list[tuple[str, str, bool, str]]:
    """Token limits of micro-batches: key, group of the engine, whether used, key it follows."""
    parts = config.actor_rollout_ref
    needs_reference = bool(config.algorithm.use_kl_in_reward or parts.actor.use_kl_loss)
    has_critic = bool(config.critic.enable and config.critic.use_dynamic_bsz)
    actor = f"{ACTOR}.ppo_max_token_len_per_gpu"
    return [
        (actor, ACTOR, bool(parts.actor.use_dynamic_bsz), actor),
        (
            f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
            ACTOR,
            bool(parts.rollout.log_prob_use_dynamic_bsz),
            actor,
        ),
        (
            f"{REFERENCE}.log_prob_max_token_len_per_gpu",
            REFERENCE,
            bool(needs_reference and parts.ref.log_prob_use_dynamic_bsz),
            actor,
        ),
        (
            f"{CRITIC}.ppo_max_token_len_per_gpu",
            CRITIC,
            has_critic,
            f"{CRITIC}.ppo_max_token_len_per_gpu",
        ),
        (
            f"{CRITIC}.ppo_infer_max_token_len_per_gpu",
            CRITIC,
            has_critic,
            f"{CRITIC}.forward_max_token_len_per_gpu",
        ),
    ]


def _ulysses(config: DictConfig, group: str) -> int:
    """Number of GPUs that share a row: verl multiplies the token limit by it."""
    part = OmegaConf.select(config, group)
    engine = part.fsdp if group == CRITIC else part.fsdp_config
    return max(each.get("ulysses_sequence_parallel_size") or 1 for each in (part, engine))


def _large_logits(config: DictConfig, vocabulary: int | None) -> list[str]:
    key = f"{ACTOR}.ppo_max_token_len_per_gpu"
    tokens = OmegaConf.select(config, key)
    if (
        vocabulary is None
        or tokens * vocabulary <= 2 * MOST_LOGITS
        or not config.actor_rollout_ref.actor.use_dynamic_bsz
        or config.actor_rollout_ref.model.use_fused_kernels
        # agl_fast's engine computes logits in chunks.
        or Level.of(config.agentlightning.trace_aggregator.level).is_tree
        or (config.actor_rollout_ref.model.override_config or {}).get(ATTENTION) == ENGINE
    ):
        return []
    gib = tokens * vocabulary * LOGIT_BYTES / 2**30
    return [
        f"{key}={tokens}: with a vocabulary of {vocabulary}, the logits of a micro-batch and their "
        f"gradients take up to {gib:.0f} GiB of a GPU. actor_rollout_ref.model.use_fused_kernels="
        "true, level tree, or smaller limits of a row take less"
    ]
