"""Empty training steps are skipped, up to a number of consecutive ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.training_loop import FakeDaemon, Loop, keep_logs  # isort: skip

import agl_fast
from agl_fast.training import AgentLightningTrainer, ppo_step
from agl_fast.training.run_summary import NothingTrainedError
from agl_fast.training.step import step_without_rows
from agl_fast.verl.config import compose
from agl_fast.verl.supervision.watch import ServersAlive
from support.verl_settings import documented

EMPTY = "training/n_empty_steps"


def all_failed() -> agl_fast.EmptyBatchError:
    counts = {"training/failed_rollouts": 12, "training/skipped_tokens": 7}
    return agl_fast.EmptyBatchError("none of 12 rollouts", agl_fast.Accounting(), counts)


class PartlyEmpty(Loop):
    """Some of whose steps sample, or leave to learning, nothing."""

    def __init__(self, *, sampled: set[int], learned: set[int] = frozenset(), **settings: Any):
        super().__init__(val_before_train=False, **settings)
        self.sampled, self.learned = sampled, learned

    def sample(self, columns: Any) -> Any:
        found = super().sample(columns)
        if self.global_steps in self.sampled:
            raise all_failed()
        return found

    def learn(self, batch: Any, *, n_rollouts: int) -> Any:
        step = super().learn(batch, n_rollouts=n_rollouts)
        return step_without_rows(all_failed()) if self.global_steps in self.learned else step


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, dict[str, Any]]]:
    return keep_logs(monkeypatch)


def test_a_run_goes_on_after_an_empty_step(logged, caplog, tmp_path):
    loop = PartlyEmpty(sampled={2}, save_freq=2, test_freq=2, default_local_dir=str(tmp_path))
    loop.fit()
    assert loop.events == [
        *[("sync", 0), ("sample", 0), ("learn", 12), ("sync", 1)],
        *[("sample", 1), ("save", 2), ("sync", 2), ("validate", 2, 2)],
        *[("sample", 2), ("learn", 12), ("sync", 3)],
        *[("sample", 3), ("learn", 12), ("save", 4), ("sync", 4), ("validate", 2, 4), "stop"],
    ]
    assert [number for number, _ in logged] == [1, 2, 3, 4, -1]
    assert [metrics[EMPTY] for _, metrics in logged[:-1]] == [0, 1, 0, 0]
    empty = logged[1][1]
    assert empty["training/global_step"] == 2
    assert empty["training/failed_rollouts"] == 12
    assert empty["val/reward"] == 1.0
    assert empty["training/n_mini_batches"] == 0
    assert {"timing_s/step", "timing_s/gen", "timing_s/save_checkpoint"} <= empty.keys()
    # Of no rollout, neither a reward nor a loss.
    assert {"training/reward", "actor/loss"}.isdisjoint(empty)
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "none of 12 rollouts" in record.message
    assert "(1 consecutive, limit agentlightning.max_empty_steps=3)" in record.message
    assert loop.token_summary.n_steps == 4


@pytest.mark.parametrize("of_learning", [False, True])
def test_a_run_that_trained_nothing_is_an_error(logged, of_learning):
    """Fewer steps than `max_empty_steps` allows in a row."""
    empty = {1, 2, 3, 4}
    loop = PartlyEmpty(
        sampled=set() if of_learning else empty, learned=empty if of_learning else set()
    )
    loop.config.agentlightning.max_empty_steps = 9
    with pytest.raises(NothingTrainedError, match="all 4 steps were empty"):
        loop.fit()
    assert loop.events[-1] == "stop"


@pytest.mark.parametrize("of_learning", [False, True])
@pytest.mark.parametrize(("limit", "ends_in"), [(0, 1), (1, 2), (3, 4)])
def test_too_many_in_a_row_end_the_run(logged, limit, ends_in, of_learning):
    empty = {1, 2, 3, 4}
    loop = PartlyEmpty(
        sampled=set() if of_learning else empty, learned=empty if of_learning else set()
    )
    loop.config.agentlightning.max_empty_steps = limit
    with pytest.raises(agl_fast.EmptyBatchError, match="none of 12 rollouts"):
        loop.fit()
    assert loop.global_steps == ends_in
    assert loop.events[-1] == "stop"
    assert [number for number, _ in logged] == [*range(1, ends_in), -1]
    assert logged[-1][1] == {"exit_code": 1}


def test_a_step_that_learns_begins_the_count_anew(logged):
    loop = PartlyEmpty(sampled={1, 3}, learned={4})
    loop.config.agentlightning.max_empty_steps = 2
    loop.fit()
    assert [metrics[EMPTY] for _, metrics in logged[:-1]] == [1, 0, 1, 1]


def test_rows_are_not_written_down_where_there_are_none(logged, monkeypatch):
    loop = PartlyEmpty(sampled={1}, learned={2}, rollout_data_dir="rows")
    dumped: list[int] = []
    monkeypatch.setattr(loop, "_dump_rows", lambda *_: dumped.append(loop.global_steps))
    loop.fit()
    assert dumped == [3, 4]


def test_servers_sleep_and_the_daemon_forgets_after_an_empty_step():
    loop = Loop()
    loop.global_steps = 1
    loop.config.data = {"max_prompt_length": 4, "max_response_length": 4}
    loop.servers_alive = ServersAlive([], [], loop.deadlines().server_silent)
    loop.agent_mode_daemon = daemon = FakeDaemon(loop.events)
    daemon.clear_data_and_server = lambda: loop.events.append("clear")

    def no_rows(**_: Any) -> Any:
        raise all_failed()

    daemon.get_train_data_batch = no_rows
    loop.checkpoint_manager = SimpleNamespace(sleep_replicas=lambda: loop.events.append("sleep"))
    with pytest.raises(agl_fast.EmptyBatchError):
        AgentLightningTrainer.sample(loop, {"task": np.arange(2)})
    assert loop.events == ["clear", "sleep"]


def test_an_empty_step_has_the_timings_of_others():
    loop = Loop()
    loop.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 2)
    rows = step_without_rows(all_failed()).rows
    metrics = AgentLightningTrainer._timing_metrics(loop, rows, {"gen": 3.0, "step": 4.0})
    assert (metrics["timing_s/gen"], metrics["perf/time_per_step"]) == (3.0, 4.0)
    assert metrics["perf/throughput"] == metrics["timing_per_token_ms/gen"] == 0


@pytest.mark.filterwarnings("ignore")  # of verl, vLLM and what they import
def test_a_step_whose_rows_are_all_dropped_asks_no_worker_and_says_why():
    rollout = agl_fast.Rollout("r", "d", [agl_fast.Call([1] * 9, [2])], 1.0)
    limits = {"max_prompt_length": 4, "max_response_length": 4}
    batch = agl_fast.build_batch([rollout], level="transition", pad_token_id=0, **limits)
    assert batch.tensors["is_drop_mask"].tolist() == [True]
    config = compose(documented(), device="cuda").config
    taken = ppo_step(batch, None, config, n_rollouts=1, global_step=5)
    assert str(taken.empty).startswith("step 5: all 1 rows are dropped")
    assert "'overlong_prompt': 1" in str(taken.empty)
    assert taken.empty.accounting == batch.accounting
    assert taken.metrics["training/n_triplets_prompt_too_long"] == 1
    assert taken.metrics["training/n_mini_batches"] == 0
    assert len(taken.rows) == 0
