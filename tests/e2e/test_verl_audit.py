"""The audit of whole runs in bfloat16: silent where all is well, the end where a sync is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu]")
pytest.importorskip("vllm", reason="needs the extra [cpu]")

from support.verl_runs import TIMEOUT_SECONDS, assert_nothing_left, lines, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_SECONDS)]
APART = "probabilities of servers and actor differ"


def test_four_healthy_steps_in_bfloat16_say_nothing(tmp_path: Path) -> None:
    finished = run(tmp_path, "--config", "bfloat16", "--steps", "4")
    assert finished.returncode == 0, finished.output[-4000:]
    assert_nothing_left(finished)
    assert APART not in finished.output
    logged = lines(tmp_path / "metrics-4.jsonl")
    assert [line["step"] for line in logged] == [1, 2, 3, 4]
    for metrics in (line["data"] for line in logged):
        # Rounding, and no more.
        assert 1e-6 < metrics["training/audit/prob_diff_mean"] < 0.01
        assert metrics["training/audit/logit_diff"] < 0.12
        assert metrics["training/rollout_probs_diff_valid"] == 1


def test_servers_that_get_no_update_end_the_run(tmp_path: Path) -> None:
    """Step 1 samples with the first weights; the actor learns, the servers do not."""
    finished = run(tmp_path, "--config", "deaf", "--steps", "8")
    assert finished.returncode != 0
    assert_nothing_left(finished)
    assert "PolicyMismatchError" in finished.output
    assert "the servers do not hold the actor's weights" in finished.output
    logged = {line["step"]: line["data"] for line in lines(tmp_path / "metrics-8.jsonl")}
    assert logged[1]["training/audit/logit_diff"] < 0.12
    assert len(logged) < 8
