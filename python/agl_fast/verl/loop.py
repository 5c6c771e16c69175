"""The quickstart's training loop: sample, build rows, PPO step, weight sync."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import agl_fast
from agl_fast.verl import session, two_call_task
from agl_fast.verl.console import Console
from agl_fast.verl.deadline import deadline
from agl_fast.verl.rollouts import Sampling, run_tasks
from agl_fast.verl.tiny_model import make_tiny_model
from agl_fast.verl.trainer.row_trainer import RowTrainer
from agl_fast.verl.two_call_task import TwoCallTask

HEADER = (
    " step  reward  correlation  rollouts  merged  rows  tokens  seconds  (sample  update   sync)"
)


@dataclass(frozen=True)
class StepReport:
    """One line of the console, and of metrics.jsonl with verl's metrics.

    Attributes:
        merged: rollouts that became one row, as their second prompt extended the first call.
        tokens: sampled tokens that the step trained.
    """

    step: int
    reward: float
    correlation: float
    rollouts: int
    merged: int
    rows: int
    tokens: int
    sample_seconds: float
    update_seconds: float
    sync_seconds: float
    actor_metrics: dict[str, float]

    def __str__(self) -> str:
        seconds = self.sample_seconds + self.update_seconds + self.sync_seconds
        return (
            f"{self.step:5d}  {self.reward:6.3f}  {self.correlation:11.6f}  {self.rollouts:8d}"
            f"  {self.merged:6d}  {self.rows:4d}  {self.tokens:6d}  {seconds:7.2f}"
            f"  {self.sample_seconds:7.2f} {self.update_seconds:7.2f} {self.sync_seconds:6.2f}"
        )


def train(
    console: Console,
    run_folder: Path,
    temporary: Path,
    *,
    steps: int,
    overrides: Sequence[str],
    verbose: bool,
) -> list[StepReport]:
    """Make the model, start Ray and verl, train for `steps` steps, stop Ray whatever happens."""
    config = session.compose_config(run_folder / "model", steps=steps, overrides=overrides)
    seconds = config.quickstart.seconds
    with console.phase("tiny model and tokenizer", seconds.start):
        make_tiny_model(
            run_folder / "model",
            two_call_task.corpus(),
            max_length=config.actor_rollout_ref.rollout.max_model_len,
            seed=config.quickstart.seed,
        )
    with session.local_ray(temporary, slots=1, log_to_driver=verbose):
        with console.phase("FSDP2 actor and vLLM server (one to three minutes)", seconds.start):
            trainer = session.start_trainer(config, two_call_task.all_tasks())
            registrations = session.require_registrations(trainer)
        for worker in registrations:
            console.say(
                f"  worker {worker['pid']}: {worker['platform']}, {', '.join(worker['engines'])}"
            )
        with console.phase("first weight sync", seconds.weight_sync):
            trainer.checkpoint_manager.update_weights(0)

        reports: list[StepReport] = []
        batches = itertools.chain.from_iterable(itertools.repeat(trainer.train_dataloader))
        console.say(HEADER)
        with open(run_folder / "metrics.jsonl", "w", buffering=1) as metrics:
            for step, tasks in zip(range(1, steps + 1), batches, strict=False):
                report = train_step(trainer, tasks, step)
                reports.append(report)
                print(json.dumps(asdict(report)), file=metrics)
                console.say(str(report))
        return reports


def train_step(trainer: RowTrainer, tasks: Sequence[TwoCallTask], step: int) -> StepReport:
    """Sample with the current weights, build rows, take one PPO step, sync the weights."""
    config = trainer.config
    seconds = config.quickstart.seconds
    sampling = Sampling(
        model=config.actor_rollout_ref.model.path,
        max_tokens=config.quickstart.max_tokens,
        temperature=config.actor_rollout_ref.rollout.temperature,
        policy_version=step - 1,
    )
    start = time.monotonic()
    with deadline(f"sampling of step {step}", seconds.sampling):
        rollouts = asyncio.run(
            run_tasks(
                tasks,
                trainer.llm_server_manager.get_addresses(),
                sampling,
                group_size=config.quickstart.group_size,
            )
        )
    sampled = time.monotonic()
    batch = agl_fast.build_batch(
        rollouts,
        level="trajectory",
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=config.data.max_response_length,
        pad_token_id=trainer.tokenizer.pad_token_id,
        trim=True,
    )
    with deadline(f"PPO step {step}", seconds.ppo_step):
        update = trainer.train_on(batch, step=step)
    updated = time.monotonic()
    with deadline(f"weight sync of step {step}", seconds.weight_sync):
        trainer.checkpoint_manager.update_weights(step)
    synced = time.monotonic()
    return StepReport(
        step=step,
        reward=sum(rollout.reward for rollout in batch.rollouts) / len(batch.rollouts),
        correlation=update.correlation,
        rollouts=len(batch.rollouts),
        merged=sum(rollout.n_rows == 1 for rollout in batch.rollouts),
        rows=len(batch.columns["rollout_id_list"]),
        tokens=batch.accounting.trained,
        sample_seconds=sampled - start,
        update_seconds=updated - sampled,
        sync_seconds=synced - updated,
        actor_metrics=update.metrics,
    )
