"""LoRA: the servers sample with what is trained."""

from __future__ import annotations

from collections.abc import Collection

from omegaconf import DictConfig

MODEL = "actor_rollout_ref.model"
MERGE = f"{MODEL}.lora.merge"


def uses_lora(config: DictConfig) -> bool:
    """Whether the actor trains an adapter, as verl's FSDP engine decides it."""
    model = config.actor_rollout_ref.model
    return bool(model.lora_rank > 0 or model.lora_adapter_path is not None)


def merge_adapters(config: DictConfig, user_keys: Collection[str]) -> list[str]:
    """Let the servers get the actor's weights with the adapter merged into them.

    Without it verl loads the adapter beside the base model under a name of its own, by which only
    its own agent loop asks: agents would sample with the base model, whatever is trained.

    Args:
        config: changed in place.
        user_keys: dotted keys that the user has set.

    Returns:
        A line that says so, or none.

    Raises:
        ValueError: the user has set it to false.
    """
    lora = config.actor_rollout_ref.model.lora
    why = "the servers sample with the trained adapter only where it is merged into their weights"
    if lora.merge:
        return []
    if MERGE in user_keys:
        raise ValueError(f"{MERGE}=False: expected True, or not to be set, as {why}")
    lora.merge = True
    return [f"{MERGE}=true, as {why}"]
