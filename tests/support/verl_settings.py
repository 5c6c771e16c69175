"""Settings for VERL as users of Agent-lightning write them."""

from __future__ import annotations

import copy
from typing import Any

# The keys of the documented example for Agent-lightning 0.3.
DOCUMENTED: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "data": {"train_batch_size": 16, "max_prompt_length": 512, "max_response_length": 256},
    "actor_rollout_ref": {
        "rollout": {
            "tensor_model_parallel_size": 1,
            "n": 4,
            "log_prob_micro_batch_size_per_gpu": 4,
            "multi_turn": {"format": "hermes"},
            "name": "vllm",
            "gpu_memory_utilization": 0.6,
        },
        "actor": {
            "ppo_mini_batch_size": 16,
            "ppo_micro_batch_size_per_gpu": 4,
            "optim": {"lr": 1e-6},
            "use_kl_loss": False,
            "kl_loss_coef": 0.0,
            "entropy_coeff": 0,
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.3,
            "fsdp_config": {"param_offload": True, "optimizer_offload": True},
        },
        "ref": {"log_prob_micro_batch_size_per_gpu": 8, "fsdp_config": {"param_offload": True}},
        "model": {
            "path": "some/model",
            "use_remove_padding": True,
            "enable_gradient_checkpointing": True,
        },
    },
    "trainer": {
        "n_gpus_per_node": 1,
        "val_before_train": True,
        "critic_warmup": 0,
        "logger": ["console", "wandb"],
        "project_name": "a project",
        "experiment_name": "an experiment",
        "nnodes": 1,
        "save_freq": 64,
        "test_freq": 32,
        "total_epochs": 2,
    },
}


def documented(**changes: Any) -> dict[str, Any]:
    """The example, with values at dotted keys (written with `__` for `.`) changed or added."""
    return changed(DOCUMENTED, changes)


def changed(original: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    settings = copy.deepcopy(original)
    for key, value in changes.items():
        *groups, name = key.split("__")
        node = settings
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = value
    return settings
