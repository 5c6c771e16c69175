"""The closing paragraph of a run: failures, the audit, where tokens went, what is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from support.training_loop import FakeDaemon, Loop, keep_logs  # isort: skip

import agl_fast
from agl_fast.rollouts.finished import FinishedRollout
from agl_fast.rollouts.rollout_metrics import Failures
from agl_fast.training.checkpoints import last_checkpoint
from agl_fast.training.run_summary import (
    NothingTrainedError,
    closing_lines,
    note_worst_audit,
)

GAP, CORRELATION = "training/audit/prob_diff_mean", "training/audit/prob_correlation"
AUDIT = "audit of the servers' probabilities against the actor's, worst step: mean difference "


def config(folder: Path | None = None, recordings: Path | None = None) -> Any:
    return OmegaConf.create(
        {
            "trainer": {"default_local_dir": None if folder is None else str(folder)},
            "agentlightning": {"record_dir": None if recordings is None else str(recordings)},
        }
    )


def save(folder: Path, step: int) -> Path:
    saved = folder / f"global_step_{step}"
    saved.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
    return saved


def failures(*errors: str | None) -> Failures:
    """Of a rollout each; None: it succeeded."""
    found = Failures()
    found.add(
        [
            FinishedRollout(
                str(index),
                "g",
                [agl_fast.Call([1], [2])],
                1.0,
                "succeeded" if error is None else "failed",
                {},
                error=error,
            )
            for index, error in enumerate(errors)
        ]
    )
    return found


def test_all_that_is_known_in_its_order(tmp_path: Path) -> None:
    saved = save(tmp_path / "checkpoints", 6)
    save(tmp_path / "checkpoints", 4)
    (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").write_text("6\n")
    of_run = failures("KeyError: 'city'", None, "TimeoutError: slow", "KeyError: 'name'", None)
    lines = closing_lines(
        config(tmp_path / "checkpoints", tmp_path / "recordings"),
        {GAP: 0.001234, CORRELATION: 0.99987},
        of_run.sentence(),
    )
    assert list(lines) == [
        "3 of 5 rollouts failed, 2 of them with KeyError: 'city'.",
        f"{AUDIT}0.0012, correlation 0.9999.",
        f"last checkpoint: {saved}",
        f"recordings: {tmp_path}/recordings (python -m agl_fast analyze FILE)",
    ]


def test_nothing_is_said_of_what_is_not_there(tmp_path: Path) -> None:
    assert list(closing_lines(config(), {}, None)) == []
    assert list(closing_lines(config(tmp_path), {}, failures(None).sentence())) == []
    assert list(closing_lines(config(), {CORRELATION: 0.5}, None)) == []


def test_the_worst_step_of_the_audit() -> None:
    worst: dict[str, float] = {}
    for metrics in (
        {GAP: 0.002, CORRELATION: 0.999},
        {"training/reward": 1.0},  # too few tokens for an audit
        {GAP: 0.004},  # one token: it has no correlation
        {GAP: 0.001, CORRELATION: 0.997, f"{GAP}_of_others": 9.0},
    ):
        note_worst_audit(worst, metrics)
    assert worst == {GAP: 0.004, CORRELATION: 0.997}
    assert list(closing_lines(config(), {GAP: 0.25}, None)) == [f"{AUDIT}0.25."]


def test_relative_paths_are_said_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(Path("checkpoints"), 2)
    checkpoint, recordings = closing_lines(config(Path("checkpoints"), Path("rec")), {}, None)
    assert checkpoint == f"last checkpoint: {tmp_path}/checkpoints/global_step_2"
    assert recordings.startswith(f"recordings: {tmp_path}/rec (")


def test_a_checkpoint_that_a_run_would_resume_from(tmp_path: Path) -> None:
    assert last_checkpoint(None) is None
    assert last_checkpoint(str(tmp_path)) is None
    saved = save(tmp_path, 8)
    assert last_checkpoint(str(tmp_path)) == saved
    saved.rmdir()
    assert last_checkpoint(str(tmp_path)) is None


class Ending(Loop):
    """Two steps of 4 calls each, with what the closing paragraph tells."""

    def __init__(self, folder: Path, *, is_empty: bool = False) -> None:
        super().__init__(
            val_before_train=False, total_training_steps=2, default_local_dir=str(folder)
        )
        self.config.agentlightning.record_dir = str(folder / "recordings")
        self.is_empty = is_empty
        self.token_metrics |= {
            "training/n_calls": 4,
            "training/n_recorded_calls": 4,
            "training/finish_reason/length": 0.25,
            "training/finish_reason/stop": 0.75,
        }

    def make_daemon(self) -> Any:
        daemon = FakeDaemon(self.events)
        daemon.failures = failures("ValueError: no tool 'serach'", None, None)  # type: ignore[attr-defined]
        return daemon

    def sample(self, columns: Any) -> Any:
        if self.is_empty:
            counts = {"training/failed_rollouts": 3, **self.token_metrics}
            raise agl_fast.EmptyBatchError("none of 3 rollouts", agl_fast.Accounting(), counts)
        return super().sample(columns)

    def learn(self, batch: Any, *, n_rollouts: int) -> Any:
        audited = {GAP: 0.01 * self.global_steps, CORRELATION: 1 - 0.1 * self.global_steps}
        return SimpleNamespace(metrics=audited, rows=None, seconds={}, empty=None)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, dict[str, Any]]]:
    return keep_logs(monkeypatch)


def test_a_run_ends_with_its_closing_paragraph(
    logged: Any, tmp_path: Path, messages: Callable[[], list[str]]
) -> None:
    saved = save(tmp_path, 2)
    Ending(tmp_path).fit()
    assert messages() == [
        "2 steps sampled 20 tokens in 8 calls: 100.0% trained. 25.0% of the answers were "
        "cut off by max_tokens or the context (finish reason length). Level transition builds one "
        "row per call; level trajectory merges calls that extend each other into one row.",
        "1 of 3 rollouts failed, all with ValueError: no tool 'serach'.",
        f"{AUDIT}0.02, correlation 0.8000.",
        f"last checkpoint: {saved}",
        f"recordings: {tmp_path}/recordings (python -m agl_fast analyze FILE)",
    ]


def test_a_run_that_trained_nothing_says_so_after_the_failures(
    logged: Any, tmp_path: Path, messages: Callable[[], list[str]]
) -> None:
    with pytest.raises(NothingTrainedError) as caught:
        Ending(tmp_path, is_empty=True).fit()
    assert str(caught.value) == (
        "this run trained nothing: all 2 steps were empty. The last one: none of 3 rollouts"
    )
    assert isinstance(caught.value.__cause__, agl_fast.EmptyBatchError)
    assert logged[-1] == (-1, {"exit_code": 1})
    said = messages()
    assert "1 of 3 rollouts failed, all with ValueError: no tool 'serach'." in said
    assert "audit of the servers" not in str(said)
    assert "last checkpoint" not in str(said)
