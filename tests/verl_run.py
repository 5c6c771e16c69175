"""A run of VERL in an agentlightning.Trainer, for test_verl_end_to_end.

Two runner processes, a tiny model that is made here, an agent of two calls. Every batch is held
against agl_fast.reference, and written to FOLDER/batches.jsonl as its rollouts and row counts.
`--steps` is where training ends; a checkpoint in FOLDER is resumed. `--kill-server` kills the vLLM
engine while that step samples.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
)

import agentlightning
import openai
import psutil
import torch

import agl_fast
from agl_fast.algorithm import VERL
from agl_fast.verl import two_call_task
from agl_fast.verl.daemon import AgentModeDaemon
from agl_fast.verl.leftovers import RUN_VARIABLE
from agl_fast.verl.tiny_model import make_tiny_model
from agl_fast.verl.trainer import AgentLightningTrainer

P, R = 64, 96
INTEGERS = ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask")
TASKS = [
    {"subject": subject, "data_source": "r" if "r" in subject else "other"}
    for subject in two_call_task.SUBJECTS
]


@agentlightning.rollout
async def count(task: Any, llm: agentlightning.LLM) -> float:
    messages: list[Any] = []
    answers = []
    async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key="none") as client:
        for question in two_call_task.TwoCallTask(task["subject"]).questions():
            messages.append(question)
            completion = await client.chat.completions.create(
                model=llm.model, messages=messages, max_tokens=12, temperature=0.3
            )
            answers.append(completion.choices[0].message.content or "")
            messages.append({"role": "assistant", "content": answers[-1]})
    return two_call_task.reward(answers)


class ComparingDaemon(AgentModeDaemon):
    """Holds its rows against the reference."""

    folder: Path
    kill_server_at: int | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.taken: dict[str, list[agl_fast.Call]] = {}
        take = self.llm_proxy.recorder.take

        def keep_what_is_taken(rollout_id: str, attempt_id: str) -> Any:
            recorded = take(rollout_id, attempt_id)
            self.taken[rollout_id] = [each.call for each in recorded]
            return recorded

        self.llm_proxy.recorder.take = keep_what_is_taken

    def get_train_data_batch(self, *args: Any, **kwargs: Any) -> Any:
        found = super().get_train_data_batch(*args, **kwargs)
        batch = self.last_batch
        rollouts = [
            agl_fast.Rollout(
                entry.rollout_id, entry.data_id, self.taken[entry.rollout_id], entry.reward
            )
            for entry in batch.rollouts
        ]
        expected = agl_fast.reference.build_batch(
            rollouts,
            level="trajectory",
            max_prompt_length=P,
            max_response_length=R,
            pad_token_id=self.pad_token_id,
            trim=True,
        )
        for name in INTEGERS:
            assert batch.tensors[name].tolist() == expected.tensors[name], name
        for name in ("token_level_scores", "rollout_log_probs"):
            torch.testing.assert_close(
                batch.tensors[name], torch.tensor(expected.tensors[name], dtype=torch.float32)
            )
        with open(self.folder / "batches.jsonl", "a") as out:
            line = {
                "step": kwargs["global_steps"],
                "rows": len(batch),
                "rollouts": [
                    [entry.rollout_id, entry.data_id, entry.reward, entry.n_calls]
                    for entry in batch.rollouts
                ],
                "policy_versions": sorted(
                    {call.policy_version for rollout in rollouts for call in rollout.calls}
                ),
            }
            print(json.dumps(line), file=out)
        return found

    def run_until_all_finished(self, verbose: bool = True) -> None:
        if self.is_train and self.policy_version + 1 == self.kill_server_at:
            kill_engines()
        super().run_until_all_finished(verbose)


def kill_engines() -> None:
    """vLLM's engine processes of this run."""
    for process in psutil.process_iter(["name", "cmdline"]):
        try:
            of_run = process.environ().get(RUN_VARIABLE) == os.environ[RUN_VARIABLE]
        except psutil.Error:
            continue
        if of_run and "EngineCore" in " ".join([process.name(), *process.cmdline()]):
            process.send_signal(signal.SIGKILL)


def settings(folder: Path, steps: int) -> dict[str, Any]:
    return {
        "algorithm": {"adv_estimator": "grpo"},
        "data": {
            "train_batch_size": 4,
            "val_batch_size": 3,
            "max_prompt_length": P,
            "max_response_length": R,
        },
        "actor_rollout_ref": {
            "model": {"path": str(folder / "model"), "enable_gradient_checkpointing": False},
            "actor": {
                "ppo_mini_batch_size": 2,
                "use_dynamic_bsz": True,
                "ppo_max_token_len_per_gpu": 4096,
                "optim": {"lr": 0.003},
            },
            "rollout": {
                "n": 4,
                "max_model_len": P + R,
                "max_num_seqs": 64,
                "max_num_batched_tokens": 2048,
                "engine_kwargs": {"vllm": {"distributed_executor_backend": "uni"}},
            },
        },
        "agentlightning": {
            "trace_aggregator": {
                "level": "trajectory",
                "trajectory_max_prompt_length": P,
                "trajectory_max_response_length": R,
            },
        },
        "trainer": {
            "logger": ["console", "file"],
            "project_name": "agl_fast",
            "experiment_name": "end_to_end",
            "default_local_dir": str(folder / "checkpoints"),
            "total_training_steps": steps,
            "save_freq": 2,
            "test_freq": 3,
            "max_actor_ckpt_to_keep": 1,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--kill-server", type=int, default=None)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()

    os.environ["VERL_FILE_LOGGER_PATH"] = str(options.folder / f"metrics-{options.steps}.jsonl")
    if not (options.folder / "model").exists():
        make_tiny_model(options.folder / "model", two_call_task.corpus(), max_length=P + R, seed=1)
    ComparingDaemon.folder = options.folder
    ComparingDaemon.kill_server_at = options.kill_server
    trainer = agentlightning.Trainer(
        algorithm=VERL(
            settings(options.folder, options.steps),
            trainer_cls=AgentLightningTrainer,
            daemon_cls=ComparingDaemon,
        ),
        n_runners=2,
        strategy={"type": "cs", "server_port": options.port},
    )
    trainer.fit(count, train_dataset=TASKS, val_dataset=TASKS[:5])


if __name__ == "__main__":
    main()
