"""Ctrl-C while agents run."""

from __future__ import annotations

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu]")
pytest.importorskip("vllm", reason="needs the extra [cpu]")

from support.verl_runs import TIMEOUT_SECONDS, assert_nothing_left, lines, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT_SECONDS)]


def test_an_interrupted_run_leaves_nothing(tmp_path):
    finished = run(tmp_path, "--config", "trajectory", "--steps", "3", "--interrupt", "2")
    assert [line["step"] for line in lines(tmp_path / "metrics-3.jsonl")] == [0, 1]
    assert "is dead" not in finished.output
    assert_nothing_left(finished)
