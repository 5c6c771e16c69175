"""What the quickstart gives to `VERL`, on a CPU and on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agl_fast.quickstart.tiny_model import MAX_LENGTH

PROMPT_WIDTH, RESPONSE_WIDTH = 128, 128
GROUP_SIZE = 8
# Short and long searches in turn: a mini-batch has as many of the ones as of the others.
SAMPLES_PER_STEP, SAMPLES_PER_MINI_BATCH = 8, 4


def verl_settings(
    run_folder: Path, *, model: str | None, steps: int, seed: int, n_devices: int = 1
) -> dict[str, Any]:
    """The dictionary for `VERL`, at level trajectory.

    Args:
        model: a name or folder of the user's model; None: the tiny one in `run_folder`.
        seed: of vLLM's sampling.
        n_devices: GPUs of this machine, all of which are used.
    """
    is_tiny = model is None
    widths = (PROMPT_WIDTH, RESPONSE_WIDTH) if is_tiny else (1024, 2048)
    rollout: dict[str, Any] = {
        "n": GROUP_SIZE,
        "tensor_model_parallel_size": 1,
        "multi_turn": {"format": "hermes"},
        "max_model_len": MAX_LENGTH if is_tiny else sum(widths),
        "engine_kwargs": {"vllm": {"seed": seed}},
        "log_prob_use_dynamic_bsz": True,
        # Validation samples as training does.
        "val_kwargs": {"n": 4, "temperature": 1.0, "do_sample": True},
    }
    if is_tiny:
        rollout |= {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
    else:
        rollout |= {"gpu_memory_utilization": 0.5}
    return {
        "algorithm": {"adv_estimator": "grpo"},
        "data": {
            "train_batch_size": SAMPLES_PER_STEP,
            "max_prompt_length": widths[0],
            "max_response_length": 24 if is_tiny else 512,
            "shuffle": False,
        },
        "actor_rollout_ref": {
            "model": {
                "path": model or str(run_folder / "model"),
                "enable_gradient_checkpointing": not is_tiny,
            },
            "actor": {
                "ppo_mini_batch_size": SAMPLES_PER_MINI_BATCH,
                "use_dynamic_bsz": True,
                "ppo_max_token_len_per_gpu": 16384,
                "clip_ratio_high": 0.28,
                "optim": {"lr": 5e-4 if is_tiny else 1e-6},
            },
            "rollout": rollout,
        },
        "agentlightning": {
            "trace_aggregator": {
                "level": "trajectory",
                "trajectory_max_prompt_length": widths[0],
                "trajectory_max_response_length": widths[1],
            },
        },
        "trainer": {
            "n_gpus_per_node": n_devices,
            "logger": ["file"],
            "project_name": "agl_fast",
            "experiment_name": "quickstart",
            "default_local_dir": str(run_folder / "checkpoints"),
            "resume_mode": "disable",
            "total_training_steps": steps,
            "total_epochs": steps,
            "save_freq": -1,
            "test_freq": max(1, steps // 2),
            "val_before_train": True,
        },
    }
