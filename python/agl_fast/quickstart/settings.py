"""What the quickstart gives to `VERL`, on a CPU and on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agl_fast.quickstart.tiny_model import MAX_LENGTH
from agl_fast.rows.levels import LevelName

# Of the tiny model's rows, and of one answer.
PROMPT_WIDTH, RESPONSE_WIDTH, ANSWER_WIDTH = 128, 128, 24
# Where calls do not merge, every row begins with a whole prompt. Answers are longer.
REASONING_PROMPT_WIDTH, REASONING_ANSWER_WIDTH = 192, 48
# Long answers are many chances to miss a digit: the last steps are small ones.
DECAY = {"lr_scheduler_type": "cosine", "min_lr_ratio": 0.1}
GROUP_SIZE = 8
# Short and long searches in turn: a mini-batch has as many of the ones as of the others.
SAMPLES_PER_STEP, SAMPLES_PER_MINI_BATCH = 8, 4


def verl_settings(
    run_folder: Path,
    *,
    model: str | None,
    steps: int,
    seed: int,
    n_devices: int = 1,
    level: LevelName = "trajectory",
    reasoning: bool = False,
) -> dict[str, Any]:
    """The dictionary for `VERL`.

    Args:
        model: a name or folder of the user's model; None: the tiny one in `run_folder`.
        seed: of vLLM's sampling.
        n_devices: GPUs of this machine, all of which are used.
        level: of rows.
        reasoning: the tiny model reasons.
    """
    is_tiny = model is None
    widths, answer_width = (1024, 2048), 512
    if is_tiny:
        widths, answer_width = (PROMPT_WIDTH, RESPONSE_WIDTH), ANSWER_WIDTH
        if reasoning:
            widths = (REASONING_PROMPT_WIDTH, RESPONSE_WIDTH)
            answer_width = REASONING_ANSWER_WIDTH
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
            "max_response_length": answer_width,
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
                "optim": {"lr": 5e-4 if is_tiny else 1e-6} | (DECAY if reasoning else {}),
            },
            "rollout": rollout,
        },
        "agentlightning": {
            "trace_aggregator": {
                "level": level,
                "trajectory_max_prompt_length": widths[0],
                "trajectory_max_response_length": widths[1],
            },
            "record_dir": str(run_folder / "recordings"),
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
