"""VERL end to end: two ranks and two servers, the engine without flash-attn, LoRA."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu]")
pytest.importorskip("vllm", reason="needs the extra [cpu]")

from support.verl_runs import TIMEOUT_SECONDS, assert_nothing_left, lines, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT_SECONDS)]


def run_of(
    tmp_path_factory: pytest.TempPathFactory, config: str, n_steps: int
) -> tuple[Path, list[dict[str, float]]]:
    """Run all steps; the run's folder and the metrics of each step."""
    folder: Path = tmp_path_factory.mktemp(f"verl-{config}", numbered=True)
    finished = run(folder, "--config", config, "--steps", str(n_steps))
    assert finished.returncode == 0, finished.output[-4000:]
    assert_nothing_left(finished)
    logged = [line for line in lines(folder / f"metrics-{n_steps}.jsonl") if line["step"] > 0]
    assert [line["step"] for line in logged] == list(range(1, n_steps + 1))
    return folder, [line["data"] for line in logged]


@pytest.mark.parametrize("config", ["two-ranks", "two-ranks-tree", "packed", "lora"])
def test_two_steps(tmp_path_factory: pytest.TempPathFactory, config: str) -> None:
    """`packed`: rows of level trajectory through the engine that runs without flash-attn take."""
    folder, logged = run_of(tmp_path_factory, config, n_steps=2)
    for metrics in logged:
        assert metrics["training/tokens/trained"] > 0
        assert metrics["training/audit/n_tokens"] == metrics["training/tokens/trained"]
        # The servers hold the weights of all ranks, and with LoRA the adapter's.
        assert metrics["training/audit/prob_diff_max"] < 1e-4
        assert metrics["actor/grad_norm"] > 0
    batches = lines(folder / "batches.jsonl")
    assert all(batch["policy_versions"] == [batch["step"] - 1] for batch in batches)


@pytest.mark.parametrize("mode", ["partial", "overlap"])
def test_rollouts_go_on_across_steps(tmp_path_factory: pytest.TempPathFactory, mode: str) -> None:
    folder, logged = run_of(tmp_path_factory, mode, n_steps=5)
    for metrics in logged:
        share = metrics.get("training/staleness/tokens/0", 0.0)
        # Stale tokens are of other weights, and not compared.
        n_compared = round(metrics["training/tokens/trained"] * share)
        assert metrics["training/audit/n_tokens"] == n_compared
        assert metrics.get("training/audit/prob_diff_max", 0.0) < 1e-4
        assert metrics["training/staleness/max"] <= 2
        assert metrics["rollout_corr/rollout_is_max"] <= 2.0
    assert {"val/reward"} <= logged[1].keys()
    batches = lines(folder / "batches.jsonl")
    trained = [tuple(rollout[:2]) for batch in batches for rollout in batch["rollouts"]]
    assert len(trained) == len(set(trained)) == 5 * 4 * 4
    stale = [version for batch in batches for version in batch["policy_versions"]]
    assert len(set(stale)) > 2
