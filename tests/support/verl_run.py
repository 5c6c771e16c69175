"""A run of VERL in an agentlightning.Trainer, for test_verl_end_to_end.

Two runner processes, a tiny model that is made here, an agent of two calls. Every batch is held
against agl_fast.reference, and written to FOLDER/batches.jsonl as its rollouts and row counts.
`--steps` is where training ends; a checkpoint in FOLDER is resumed. `--kill-server` kills the vLLM
engine while that step samples, `--interrupt` does what Ctrl-C does. FOLDER/phases gets a line, such
as `update 2`, before each phase of a step; one that FOLDER/hold names waits until that file goes.
`--store` is the port of a store that another process serves.

Configurations: `trajectory` and `tree`, both also with two ranks and two servers; `packed`, level
trajectory through the engine for trees; `lora`; `documented`, the example of Agent-lightning's
documentation with other sizes, another model and other loggers; `bfloat16` on both sides; `deaf`,
likewise with servers that get no update; `killed`, whose every step is saved; `partial` and
`overlap`, whose rollouts go on across steps.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

from support.verl_environment import ENVIRONMENT

os.environ.update(ENVIRONMENT)  # before anything reads it

import agentlightning
import psutil
import torch

import agl_fast
from agl_fast import VERL, AgentLightningTrainer, AgentModeDaemon
from support import two_call_task, verl_agents
from support.tiny_model import make_tiny_model
from support.verl_settings import changed, documented

P, R = 64, 96
INTEGERS = ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask")
TASKS = [
    {"subject": subject, "data_source": "r" if "r" in subject else "other"}
    for subject in two_call_task.SUBJECTS
]


class ComparingDaemon(AgentModeDaemon):
    """Holds its rows against the reference."""

    folder: Path
    level: str
    kill_server_at: int | None = None
    interrupt_at: int | None = None

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
            level=self.level,
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
        step = self.policy_version + 1 if self.is_train else 0
        if step == self.kill_server_at:
            kill_engines()
        if step == self.interrupt_at:
            os.killpg(0, signal.SIGINT)
        super().run_until_all_finished(verbose)


class AnnouncingTrainer(AgentLightningTrainer):
    """Says which phase begins."""

    folder: Path

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        self._begin("sampling")
        return super().sample(*args, **kwargs)

    def learn(self, *args: Any, **kwargs: Any) -> Any:
        self._begin("update")
        return super().learn(*args, **kwargs)

    def sync_weights(self) -> None:
        self._begin("sync")
        super().sync_weights()

    def _save_checkpoint(self) -> None:
        self._begin("save")
        super()._save_checkpoint()

    def _begin(self, phase: str) -> None:
        line = f"{phase} {self.global_steps}"
        with open(self.folder / "phases", "a") as out:
            print(line, file=out)
        hold = self.folder / "hold"
        while hold.exists() and hold.read_text() == line:
            time.sleep(0.02)


def kill_engines() -> None:
    """vLLM's engine processes of this run."""
    for process in psutil.process_iter(["name", "cmdline"]):
        try:
            of_run = process.environ().get("AGL_FAST_TEST") == os.environ["AGL_FAST_TEST"]
        except psutil.Error:
            continue
        if of_run and "EngineCore" in " ".join([process.name(), *process.cmdline()]):
            process.send_signal(signal.SIGKILL)


def sizes(folder: Path, steps: int) -> dict[str, Any]:
    """What all configurations have in common, by dotted key with `__` for the dot."""
    return {
        "data__train_batch_size": 4,
        "data__val_batch_size": 3,
        "data__max_prompt_length": P,
        "data__max_response_length": R,
        "actor_rollout_ref__model__path": str(folder / "model"),
        "actor_rollout_ref__actor__ppo_mini_batch_size": 2,
        "trainer__logger": ["console", "file"],
        "trainer__default_local_dir": str(folder / "checkpoints"),
        "trainer__total_training_steps": steps,
        "trainer__total_epochs": 3,
        "trainer__save_freq": 2,
        "trainer__test_freq": 3,
    }


def trajectory(folder: Path, steps: int) -> dict[str, Any]:
    return changed(
        {},
        sizes(folder, steps)
        | {
            "algorithm__adv_estimator": "grpo",
            "actor_rollout_ref__model__enable_gradient_checkpointing": False,
            "actor_rollout_ref__actor__use_dynamic_bsz": True,
            "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 4096,
            "actor_rollout_ref__actor__optim__lr": 0.003,
            "actor_rollout_ref__rollout__n": 4,
            "actor_rollout_ref__rollout__engine_kwargs__vllm__distributed_executor_backend": "uni",
            "agentlightning__trace_aggregator__level": "trajectory",
            "agentlightning__trace_aggregator__trajectory_max_prompt_length": P,
            "agentlightning__trace_aggregator__trajectory_max_response_length": R,
            "trainer__max_actor_ckpt_to_keep": 1,
        },
    )


def tree(folder: Path, steps: int) -> dict[str, Any]:
    return changed(
        trajectory(folder, steps),
        {
            "agentlightning__trace_aggregator__level": "tree",
            "agentlightning__trace_aggregator__tree_max_tokens": 4096,
        },
    )


def bfloat16(folder: Path, steps: int) -> dict[str, Any]:
    return changed(
        trajectory(folder, steps),
        {
            "actor_rollout_ref__rollout__dtype": "bfloat16",
            "actor_rollout_ref__actor__fsdp_config__mixed_precision__param_dtype": "bf16",
            "trainer__total_epochs": steps,
            "trainer__val_before_train": False,
            "trainer__save_freq": -1,
            "trainer__test_freq": -1,
        },
    )


def deaf(folder: Path, steps: int) -> dict[str, Any]:
    """Of both precisions' limits the wider ones; the servers get no update."""
    extension = "actor_rollout_ref__rollout__engine_kwargs__vllm__worker_extension_cls"
    return changed(bfloat16(folder, steps), {extension: "support.deaf_servers.DeafExtension"})


def impatient(folder: Path, steps: int) -> dict[str, Any]:
    return changed(trajectory(folder, steps), {"agentlightning__deadlines__room_seconds": 10.0})


def lora(folder: Path, steps: int) -> dict[str, Any]:
    """Adapters alone are trained, in steps that move the policy visibly."""
    return changed(
        trajectory(folder, steps),
        {
            "actor_rollout_ref__model__lora_rank": 8,
            "actor_rollout_ref__model__lora_alpha": 32,
            "actor_rollout_ref__actor__optim__lr": 0.01,
        },
    )


def killed(folder: Path, steps: int) -> dict[str, Any]:
    """As little as possible beside the phases of a step; short waits for a store that is gone."""
    return changed(
        trajectory(folder, steps),
        {
            "agentlightning__deadlines__store_away_seconds": 15.0,
            "trainer__save_freq": 1,
            "trainer__test_freq": -1,
            "trainer__val_before_train": False,
        },
    )


def collected(folder: Path, steps: int, mode: str) -> dict[str, Any]:
    """Rollouts go on across steps that move the policy visibly."""
    return changed(
        killed(folder, steps),
        {
            "agentlightning__collection__mode": mode,
            "agentlightning__collection__drain_seconds": 0.1,
            "actor_rollout_ref__actor__optim__lr": 0.01,
            "trainer__test_freq": 2,
            "trainer__total_epochs": steps,
        },
    )


TWO_RANKS = {"trainer__n_gpus_per_node": 2}
PACKED = {"actor_rollout_ref__model__override_config__attn_implementation": "agl_fast_tree"}


def change_defaults(model: Path) -> None:
    """Let the model's folder say how to sample, which a run must not follow."""
    path = model / "generation_config.json"
    defaults = {"do_sample": True, "min_p": 0.2, "top_k": 5, "repetition_penalty": 1.5}
    path.write_text(json.dumps({**json.loads(path.read_text()), **defaults}))


RUNS = {
    "trajectory": (trajectory, verl_agents.count),
    "bfloat16": (bfloat16, verl_agents.count),
    "deaf": (deaf, verl_agents.count),
    "killed": (killed, verl_agents.count),
    "tree": (tree, verl_agents.count),
    "lora": (lora, verl_agents.count),
    "impatient": (impatient, verl_agents.count),
    "two-ranks": (
        lambda folder, steps: changed(trajectory(folder, steps), TWO_RANKS),
        verl_agents.count,
    ),
    "two-ranks-tree": (
        lambda folder, steps: changed(tree(folder, steps), TWO_RANKS),
        verl_agents.count,
    ),
    "partial": (partial(collected, mode="partial"), verl_agents.count),
    "overlap": (partial(collected, mode="overlap"), verl_agents.count),
    "packed": (
        lambda folder, steps: changed(trajectory(folder, steps), PACKED),
        verl_agents.count,
    ),
    "documented": (
        # The servers load a copy of the model, under another path.
        lambda folder, steps: documented(
            **sizes(folder, steps), actor_rollout_ref__model__use_shm=True
        ),
        verl_agents.Counter(),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--config", choices=RUNS, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--kill-server", type=int, default=None)
    parser.add_argument("--interrupt", type=int, default=None)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--proxy-port", type=int, default=None)
    parser.add_argument("--store", type=int, default=None)
    options = parser.parse_args()

    os.environ["VERL_FILE_LOGGER_PATH"] = str(options.folder / f"metrics-{options.steps}.jsonl")
    if not (options.folder / "model").exists():
        make_tiny_model(options.folder / "model", two_call_task.corpus(), max_length=P + R, seed=1)
        change_defaults(options.folder / "model")
    settings, agent = RUNS[options.config]
    AnnouncingTrainer.folder = options.folder
    algorithm = VERL(
        changed(
            settings(options.folder, options.steps),
            {"agentlightning__proxy__port": options.proxy_port},
        ),
        trainer_cls=AnnouncingTrainer,
        daemon_cls=ComparingDaemon,
    )
    ComparingDaemon.folder = options.folder
    ComparingDaemon.level = algorithm.config.agentlightning.trace_aggregator.level
    ComparingDaemon.kill_server_at = options.kill_server
    ComparingDaemon.interrupt_at = options.interrupt
    store = None
    if options.store is not None:
        store = agentlightning.LightningStoreClient(f"http://127.0.0.1:{options.store}")
    trainer = agentlightning.Trainer(
        algorithm=algorithm,
        n_runners=2,
        runner={
            "type": "agentlightning.LitAgentRunner",
            "poll_interval": 0.1,
            "interval_jitter": 0.0,
        },
        store=store,
        strategy={"type": "cs", "server_port": options.port, "managed_store": store is None},
    )
    trainer.fit(agent, train_dataset=TASKS, val_dataset=TASKS[:5])


if __name__ == "__main__":
    main()
