"""VERL end to end at level tree: rows are trees, the engine reads them as the server does."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu]")
pytest.importorskip("vllm", reason="needs the extra [cpu]")

from support.verl_runs import TIMEOUT_SECONDS, Finished, assert_nothing_left, lines, run

N_ROLLOUTS = 16
pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_SECONDS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verl-tree", numbered=True)


@pytest.fixture(scope="module")
def trained(folder: Path) -> Finished:
    return run(folder, "--config", "tree", "--steps", "2")


def test_two_steps_train_and_leave_nothing(folder, trained):
    assert trained.returncode == 0, trained.output[-4000:]
    assert_nothing_left(trained)
    logged = [line for line in lines(folder / "metrics-2.jsonl") if line["step"] > 0]
    assert [line["step"] for line in logged] == [1, 2]
    for metrics in (line["data"] for line in logged):
        assert metrics["training/n_mini_batches"] == 2
        assert metrics["training/tokens/trained"] > 0
        assert metrics["training/tokens/truncated"] == metrics["training/tokens/dropped"] == 0
        assert metrics["training/audit/n_tokens"] == metrics["training/tokens/trained"]
        # The server saw calls, the actor saw trees; a wrong parent or depth would part them.
        assert metrics["training/audit/prob_diff_max"] < 1e-4
        assert metrics["training/audit/logprob_diff/all/p99"] < 1e-4
        assert metrics["actor/grad_norm"] > 0


def test_a_rollout_is_a_row_however_often_its_history_changed(folder, trained):
    # verl_run.py has held each batch against agl_fast.reference.
    batches = lines(folder / "batches.jsonl")
    assert [batch["step"] for batch in batches] == [1, 2]
    for batch in batches:
        assert batch["rows"] == len(batch["rollouts"]) == N_ROLLOUTS
        assert all(n_calls == 2 for *_, n_calls in batch["rollouts"])
        assert batch["policy_versions"] == [batch["step"] - 1]
