"""VERL end to end: two ranks and two servers, the engine without flash-attn, LoRA."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu]")
pytest.importorskip("vllm", reason="needs the extra [cpu]")

from support.verl_runs import TIMEOUT_SECONDS, assert_nothing_left, lines, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT_SECONDS)]


@pytest.mark.parametrize("config", ["two-ranks", "two-ranks-tree", "packed", "lora"])
def test_two_steps(tmp_path_factory: pytest.TempPathFactory, config: str) -> None:
    """`packed`: rows of level trajectory through the engine that runs without flash-attn take."""
    folder: Path = tmp_path_factory.mktemp(f"verl-{config}", numbered=True)
    finished = run(folder, "--config", config, "--steps", "2")
    assert finished.returncode == 0, finished.output[-4000:]
    assert_nothing_left(finished)
    logged = [line for line in lines(folder / "metrics-2.jsonl") if line["step"] > 0]
    assert [line["step"] for line in logged] == [1, 2]
    for metrics in (line["data"] for line in logged):
        assert metrics["training/tokens/trained"] > 0
        assert metrics["training/audit/n_tokens"] == metrics["training/tokens/trained"]
        # The servers hold the weights of all ranks, and with LoRA the adapter's.
        assert metrics["training/audit/prob_diff_max"] < 1e-4
        assert metrics["actor/grad_norm"] > 0
    batches = lines(folder / "batches.jsonl")
    assert all(batch["policy_versions"] == [batch["step"] - 1] for batch in batches)
