"""How micro-batches are cut where the user does not say: by their tokens."""

from __future__ import annotations

from collections.abc import Collection

from omegaconf import DictConfig, OmegaConf

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REFERENCE = "actor_rollout_ref.ref"
CRITIC = "critic"
SAMPLER_SWITCH = f"{ROLLOUT}.log_prob_use_dynamic_bsz"


def fill_in_batches(config: DictConfig, user_keys: Collection[str]) -> list[str]:
    """Set `use_dynamic_bsz` where the user has set neither it nor the size of a micro-batch.

    verl has no default for either, and refuses a configuration without. A reference or critic for
    which the user has set a size keeps it.

    Args:
        config: changed in place; its `critic.enable` is decided.
        user_keys: dotted keys that the user has set.

    Returns:
        A line that says what was set, or none.
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
        changes |= _room_for_a_row(config, f"{ACTOR}.ppo_max_token_len_per_gpu", user_keys)
    switch = f"{CRITIC}.use_dynamic_bsz"
    if config.critic.enable and not {switch, f"{ACTOR}.use_dynamic_bsz"} & set(user_keys):
        changes[switch] = _is_open(switch, f"{CRITIC}.ppo_micro_batch_size", user_keys)
        if changes[switch]:
            changes |= _room_for_a_row(config, f"{CRITIC}.ppo_max_token_len_per_gpu", user_keys)
    said = [
        f"{key}={str(new).lower()}"
        for key, new in changes.items()
        if OmegaConf.select(config, key) != new
    ]
    for key, new in changes.items():  # also those that are so: they would follow the actor's
        OmegaConf.update(config, key, new)
    if not said:
        return []
    why = "no size of a micro-batch is set: they are cut by their tokens"
    return [f"{', '.join(said)}, as {why}"]


def check_batches(config: DictConfig) -> None:
    """Raise ValueError where the actor's log-probs are cut otherwise than its updates.

    verl's worker would end with an assertion, once Ray and the model are there.
    """
    actor = f"{ACTOR}.use_dynamic_bsz"
    wanted, found = OmegaConf.select(config, actor), OmegaConf.select(config, SAMPLER_SWITCH)
    if wanted != found:
        raise ValueError(
            f"{SAMPLER_SWITCH}={found}: expected {wanted}, as {actor}={wanted}: verl 0.9.1 has one "
            "engine for the actor's log-probs and its updates"
        )


def _is_open(switch: str, size: str, user_keys: Collection[str]) -> bool:
    return not any(key in user_keys for key in (switch, size, f"{size}_per_gpu"))


def _room_for_a_row(
    config: DictConfig, limit: str, user_keys: Collection[str]
) -> dict[str, bool | int]:
    """A micro-batch must hold the longest row."""
    rows = config.agentlightning.trace_aggregator
    longest = {
        "transition": config.data.max_prompt_length + config.data.max_response_length,
        "trajectory": rows.trajectory_max_total_length
        or rows.trajectory_max_prompt_length + rows.trajectory_max_response_length,
        "tree": rows.tree_max_tokens,
    }[rows.level]
    if limit in user_keys or OmegaConf.select(config, limit) >= longest:
        return {}
    return {limit: longest}
