"""VERL from end to end on the CPU: an agent, two runners, Ray, FSDP2, vLLM, checkpoint, resume."""

from __future__ import annotations

import hashlib
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu]")
pytest.importorskip("vllm", reason="needs the extra [cpu]")

from support import two_call_task
from support.served_model import greedy_of_transformers, log_probs, served
from support.verl_runs import (
    TIMEOUT_SECONDS,
    Finished,
    assert_nothing_left,
    environment,
    lines,
    run,
)

N_ROLLOUTS = 16
pytestmark = pytest.mark.timeout(2 * TIMEOUT_SECONDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("verl", numbered=True)
    yield folder
    # verl's copy of a model that is loaded from shared memory stays.
    name = hashlib.md5(str(folder / "model").encode()).hexdigest()
    shutil.rmtree(Path("/dev/shm/verl-cache") / name, ignore_errors=True)


@pytest.fixture(scope="module")
def trained(folder: Path) -> Finished:
    """Three steps from scratch, at level trajectory, with an `@agl.rollout` agent."""
    return run(folder, "--config", "trajectory", "--steps", "3")


@pytest.fixture(scope="module")
def resumed(folder: Path, trained: Finished) -> Finished:
    """A fourth step from the checkpoint, with the documented example and a class-based agent.

    At the fifth step the vLLM engine is killed.
    """
    return run(folder, "--config", "documented", "--steps", "6", "--kill-server", "5")


def assert_trained(metrics: dict[str, Any]) -> None:
    assert metrics["training/n_mini_batches"] == 2
    assert metrics["training/n_rollouts_w_reward"] == N_ROLLOUTS
    assert metrics["training/audit/n_tokens"] == metrics["training/tokens/trained"]
    assert metrics["training/audit/prob_diff_max"] < 1e-4
    assert metrics["training/audit/logprob_diff/all/p99"] < 1e-4
    assert metrics["actor/grad_norm"] > 0
    # The agents ask for another temperature and a budget, training samples with its own.
    for name in ("", ".temperature", ".thinking_token_budget"):
        assert metrics[f"training/proxy/sampling_overridden{name}"] == 2 * N_ROLLOUTS
    assert metrics["training/proxy/fields_replaced.request_id"] == 2 * N_ROLLOUTS
    assert metrics["training/proxy/seeded"] == 2 * N_ROLLOUTS
    assert "training/proxy/duplicates" not in metrics


def test_three_steps_train_and_leave_nothing(folder, trained):
    assert trained.returncode == 0, trained.output[-4000:]
    assert_nothing_left(trained)
    logged = lines(folder / "metrics-3.jsonl")
    assert [line["step"] for line in logged] == [0, 1, 2, 3]
    for line in logged[1:]:
        assert_trained(line["data"])
        assert line["data"]["training/audit/logprob_diff/after_observation/p99"] < 1e-4


def test_names_of_agent_lightning_and_verl_are_there(folder, trained):
    first, *_, last = (line["data"] for line in lines(folder / "metrics-3.jsonl"))
    for name in ("n_rollouts", "n_rollouts_w_trace", "n_rollouts_w_reward", "reward"):
        assert f"val/{name}" in first
        assert f"val/other/{name}" in last
    assert first["val/n_rollouts"] == last["val/n_rollouts"] == 5  # of two batches
    for name in (
        "training/reward",
        "training/n_triplets",
        "training/n_triplets_prompt_too_long",
        "training/n_triplets_dropped_remainder",
        "training/global_step",
        "training/epoch",
        "critic/score/mean_before_processing",
        "critic/advantages/max_after_processing",
        "response_length/mean_after_processing",
        "actor/pg_loss",
        "actor/entropy_loss",
        "timing_s/step",
        "timing_s/gen",
        "timing_s/old_log_prob",
        "timing_s/update_actor",
        "perf/throughput",
        "perf/total_num_tokens",
    ):
        assert name in last, name


def test_rows_are_those_of_the_recorded_calls(folder, trained):
    # verl_run.py has held each batch against agl_fast.reference.
    batches = [batch for batch in lines(folder / "batches.jsonl") if batch["step"] <= 3]
    assert [batch["step"] for batch in batches] == [1, 2, 3]
    for batch in batches:
        assert N_ROLLOUTS <= batch["rows"] <= 2 * N_ROLLOUTS
        assert_whole(batch, n_calls=2)


def assert_whole(batch: dict[str, Any], *, n_calls: int) -> None:
    assert len(batch["rollouts"]) == N_ROLLOUTS
    assert len({data_id for _, data_id, _, _ in batch["rollouts"]}) == 4
    assert {found for *_, found in batch["rollouts"]} == {n_calls}
    assert batch["policy_versions"] == [batch["step"] - 1]


def test_one_checkpoint_is_kept(folder, trained):
    checkpoints = folder / "checkpoints"
    assert [path.parent.name for path in checkpoints.glob("global_step_*/actor")] == [
        "global_step_3"
    ]


@pytest.mark.filterwarnings("ignore")  # of verl and what it imports
def test_vllm_serves_what_was_exported(folder, trained, tmp_path):
    from transformers import AutoTokenizer

    from agl_fast.tools.export import export

    exported = tmp_path / "exported"
    export(folder / "checkpoints" / "global_step_3", exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    prompts = [
        tokenizer(
            tokenizer.apply_chat_template(
                task.questions()[:1], add_generation_prompt=True, tokenize=False
            )
        ).input_ids
        for task in two_call_task.all_tasks()[:3]
    ]
    with served(exported, tmp_path / "vllm.log", environment(folder)) as model:
        answers = [model.greedy(prompt, 12) for prompt in prompts]
    for prompt, (ids, found) in zip(prompts, answers, strict=True):
        assert len(ids) > 1
        expected_ids, expected = greedy_of_transformers(exported, prompt, 12)
        assert ids == expected_ids
        assert found == pytest.approx(expected, abs=1e-4)
        assert found != pytest.approx(log_probs(folder / "model", prompt, ids), abs=1e-2)


def test_the_documented_example_resumes_with_the_weights_that_were_saved(folder, resumed):
    saved = lines(folder / "metrics-3.jsonl")[-1]["data"]
    found, trained = lines(folder / "metrics-6.jsonl")
    assert [found["step"], trained["step"]] == [3, 4]
    validated = {key: value for key, value in found["data"].items() if key.startswith("val/")}
    assert validated == pytest.approx({key: saved[key] for key in validated})  # greedy
    # Emitted, and arrived; a greedy random model may well have earned nothing.
    assert validated["val/n_rollouts_w_reward"] == 5
    assert_trained(trained["data"])


def test_the_documented_example_trains_a_row_per_call(folder, resumed):
    *_, batch = lines(folder / "batches.jsonl")
    assert batch["step"] == 4
    assert batch["rows"] == 3 * N_ROLLOUTS  # two answers to the second question
    assert_whole(batch, n_calls=3)


def test_the_documented_example_scores_texts_and_trains_none_of_them(folder, resumed):
    *_, trained = lines(folder / "metrics-6.jsonl")
    assert trained["data"]["training/proxy/recorded"] == 3 * N_ROLLOUTS
    assert trained["data"]["training/proxy/unrecorded"] == N_ROLLOUTS
    assert trained["data"]["training/proxy/bad_requests"] == N_ROLLOUTS


def test_a_run_ends_with_the_cause_when_the_server_dies(resumed):
    assert resumed.returncode not in (0, -signal.SIGINT)
    assert "vLLM server" in resumed.output
    assert "is dead" in resumed.output
    assert_nothing_left(resumed)
