"""Train an agent with `VERL` and record the run in a `RunLog`."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# First: it disables litellm's download when agentlightning imports it.
from agl_fast.rollouts import AgentModeDaemon, FinishedRollout  # isort: skip

import agentlightning as agl
import psutil

import agl_fast
from agl_fast.algorithm import VERL
from agl_fast.quickstart.run_log import Played, RunLog
from agl_fast.rollouts.finished import rollout_for_training
from agl_fast.rows.levels import LEVELS, LevelName
from agl_fast.training import AgentLightningTrainer

N_RUNNERS = 2
# The first update of a process is slower than the later ones.
UPDATE_ROUNDS = 3
MEMORY_POLL_SECONDS = 0.5


def train_agent(
    agent: Any,
    settings: Mapping[str, Any],
    log: RunLog,
    *,
    train_dataset: list[dict[str, Any]],
    val_dataset: list[dict[str, Any]],
) -> None:
    """Train for `log.steps` steps.

    Args:
        settings: for `VERL`.

    Raises:
        RuntimeError: the run ended before its last step.
    """
    trainer_cls, daemon_cls = reporting_to(log)
    algorithm = VERL(settings, trainer_cls=trainer_cls, daemon_cls=daemon_cls)
    log.say("starting Ray, FSDP2 and vLLM (one to two minutes) ...")
    agl.Trainer(
        algorithm=algorithm,
        n_runners=N_RUNNERS,
        # An idle runner polls every five seconds by default.
        runner={
            "type": "agentlightning.LitAgentRunner",
            "poll_interval": 0.2,
            "interval_jitter": 0.1,
        },
        # The default tracer records the client's calls, too; VERL's proxy records them already.
        tracer=agl.OtelTracer(),
        strategy={"type": "cs", "server_port": free_port()},
    ).fit(agent, train_dataset=train_dataset, val_dataset=val_dataset)
    if len(log.rewards) < log.steps:
        # Agent-lightning's Trainer also returns if Ctrl-C ends its algorithm.
        raise RuntimeError(f"the run ended after {len(log.rewards)} of {log.steps} steps")


def free_port() -> int:
    """Find a free port on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def reporting_to(log: RunLog) -> tuple[type[AgentLightningTrainer], type[AgentModeDaemon]]:
    """Subclass VERL's trainer and daemon so that they write to `log`."""

    class ReportingDaemon(AgentModeDaemon):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            self.finished: list[FinishedRollout] = []

        def rollout_finished(self, rollout: FinishedRollout) -> None:
            self.finished.append(rollout)

        def clear_data_and_server(self) -> None:
            super().clear_data_and_server()
            self.finished.clear()

        def training_batch(
            self, *arguments: Any, **keywords: Any
        ) -> tuple[agl_fast.Batch, dict[str, Any]]:
            batch, metrics = super().training_batch(*arguments, **keywords)
            rollouts = [rollout_for_training(each, self.failed_rollouts) for each in self.finished]
            rewards = [each.reward for each in batch.rollouts]
            trained = [each for each in rollouts if each]
            log.sampled(trained, sum(rewards) / len(rewards), left_out=len(rollouts) - len(trained))
            return batch, metrics

        def get_test_metrics(self) -> dict[str, float]:
            log.played[self.policy_version] = [
                Played(dict(each.sample), each.calls, each.reward or 0.0) for each in self.finished
            ]
            return super().get_test_metrics()

    class ReportingTrainer(AgentLightningTrainer):
        def sync_weights(self) -> None:
            super().sync_weights()
            log.stage_ended("training" if log.rewards else "start of Ray, FSDP2 and vLLM")

        def validate(self) -> dict[str, float]:
            metrics = super().validate()
            log.validated(self.global_steps, metrics["val/reward"])
            log.stage_ended("validation")
            return metrics

    return ReportingTrainer, ReportingDaemon


def update_seconds(run_folder: Path) -> dict[LevelName, float]:
    """Replay the first step at each level, in this process.

    The first step, because it starts from the weights in the model's folder.

    Returns:
        Seconds of the actor's update, the shortest of `UPDATE_ROUNDS`.
    """
    from agl_fast.tools.replay import replay

    recording = min(run_folder.glob("recordings/*/train-*.jsonl.gz"))

    def seconds(level: LevelName) -> float:
        settings = {"agentlightning": {"trace_aggregator": {"level": level}}}
        found = replay(recording, settings, model=run_folder / "model")
        return found.seconds["update_actor"]

    rounds = [{level: seconds(level) for level in LEVELS} for _ in range(UPDATE_ROUNDS)]
    return {level: min(each[level] for each in rounds) for level in LEVELS}


class PeakMemory:
    """Measures the peak memory use while it is entered.

    This is the largest decrease of the machine's available memory: it includes shared memory, once,
    and memory that unrelated processes allocate in the meantime.

    Attributes:
        gib: the largest decrease so far.
    """

    def __init__(self) -> None:
        self.gib = 0.0
        self._before = psutil.virtual_memory().available
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(MEMORY_POLL_SECONDS):
            used = self._before - psutil.virtual_memory().available
            self.gib = max(self.gib, used / 2**30)
