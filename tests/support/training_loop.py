"""A run's loop without Ray or models: everything is replaced that needs workers."""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

import support.verl_trainer_imports  # noqa: F401

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # litellm's
    from agl_fast.rollouts import ValidatedRollout
    from agl_fast.training import AgentLightningTrainer
    from agl_fast.training import trainer as agent_lightning
    from agl_fast.verl.supervision.deadlines import OWN_CONFIG

STEPS_PER_EPOCH = 2


class FakeDaemon:
    """Validates two samples a batch: with reward 1 in the first batch, 0 in the others."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events
        self.n_validated = 0
        self.policy_version = -1

    def start(self) -> None: ...

    def stop(self) -> None:
        self.events.append("stop")

    def set_up_data_and_server(self, data: Any, addresses: Any, is_train: bool = True) -> None:
        self.data = data

    def run_until_all_finished(self, verbose: bool = True) -> None: ...

    def get_test_metrics(self) -> dict[str, float]:
        reward = 1.0 if self.n_validated == 0 else 0.0
        self.n_validated += 1
        n_rollouts = len(self.data["task"])
        self.validated_rollouts = [
            ValidatedRollout("source", reward, True, (3,), False) for _ in range(n_rollouts)
        ]
        self.events.append(("validate", n_rollouts, self.policy_version))
        return {"val/reward": reward, "val/of_subclass": 1.0}

    def clear_data_and_server(self) -> None: ...


class Loop(AgentLightningTrainer):
    """The trainer with everything replaced that needs workers."""

    def __init__(self, *, saved_step: int = 0, n_val_batches: int = 1, **settings: Any) -> None:
        self.config = OmegaConf.create(
            {
                "trainer": {
                    "project_name": "p",
                    "experiment_name": "e",
                    "logger": [],
                    "total_epochs": 2,
                    "val_before_train": True,
                    "val_only": False,
                    "save_freq": -1,
                    "test_freq": -1,
                    "default_local_dir": "checkpoints",
                    **settings,
                },
                "actor_rollout_ref": {
                    "model": {"path": "some/model"},
                    "rollout": {"n": 3, "val_kwargs": {"n": settings.pop("val_n", 1)}},
                },
                "global_profiler": {"steps": None},
                "agentlightning": {
                    "max_empty_steps": 3,
                    "deadlines": OmegaConf.load(OWN_CONFIG).agentlightning.deadlines,
                    "trace_aggregator": {"level": "transition"},
                },
            }
        )
        self.events: list[Any] = []
        self.saved_step = saved_step
        self.validates = True
        self.train_dataloader = [{"task": np.arange(4)}] * STEPS_PER_EPOCH
        self.val_dataloader = [{"task": np.arange(2)}] * n_val_batches
        self.total_training_steps = settings.get("total_training_steps", 4)
        self.llm_server_manager = SimpleNamespace(get_addresses=list, server_handles=[])
        self.checkpoint_manager = SimpleNamespace(
            update_weights=lambda step: self.events.append(("sync", step))
        )
        self.actor_rollout_wg = SimpleNamespace(workers=[])
        self.synced_steps = 0
        self.token_metrics = {"training/tokens/sampled": 10, "training/tokens/trained": 10}

    def _load_checkpoint(self) -> None:
        self.global_steps = self.saved_step

    def make_daemon(self) -> Any:
        return FakeDaemon(self.events)

    def sample(self, columns: Any) -> Any:
        self.events.append(("sample", self.synced_steps))
        return None, {"training/reward": 0.5, **self.token_metrics}

    def learn(self, batch: Any, *, n_rollouts: int) -> Any:
        self.events.append(("learn", n_rollouts))
        return SimpleNamespace(metrics={"actor/loss": 0.0}, rows=None, seconds={}, empty=None)

    def _save_checkpoint(self) -> None:
        self.events.append(("save", self.global_steps))

    def _timing_metrics(self, rows: Any, seconds: dict[str, float]) -> dict[str, float]:
        return {f"timing_s/{name}": value for name, value in seconds.items()}

    def _start_profiling(self, *_: Any, **__: Any) -> None: ...

    def _stop_profiling(self, *_: Any, **__: Any) -> None: ...

    def _shutdown_dump_executor(self) -> None: ...


def keep_logs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, dict[str, Any]]]:
    """The steps and numbers that a run logs from now on; at its end -1 and its exit code."""
    lines: list[tuple[int, dict[str, Any]]] = []

    class Tracking:
        def __init__(self, **_: Any) -> None: ...

        def log(self, data: dict[str, Any], step: int) -> None:
            lines.append((step, data))

        def finish(self, exit_code: int = 0) -> None:
            lines.append((-1, {"exit_code": exit_code}))

    monkeypatch.setattr(agent_lightning, "Tracking", Tracking)
    return lines
