"""Several batches run in one daemon at the same time."""

from __future__ import annotations

from typing import Any

import pytest

from support.daemon_runs import HELLO, Bench, agentlightning, daemon_bench, scripted_runners

QUESTIONS = {"question": ["q0", "q1"]}


def begin(bench: Bench, *, is_train: bool) -> Any:
    return bench.daemon.begin_batch(QUESTIONS, [bench.fake.address], is_train)


def agent(run: Any) -> float:
    run.ask(run.input["question"], user=run.rollout.mode)
    return 1.0 if run.rollout.mode == "train" else 0.5


def test_a_training_and_a_validation_batch_run_at_once() -> None:
    seen: list[tuple[bool, list[int | None]]] = []
    with daemon_bench(validation_sampling={"temperature": 0.0}) as bench:
        daemon = bench.daemon
        daemon.policy_version = 2
        training, validation = (begin(bench, is_train=each) for each in (True, False))
        daemon.rollout_finished = lambda rollout: seen.append(
            (rollout.rollout_id in training.rollout_ids, [c.policy_version for c in rollout.calls])
        )
        with scripted_runners(bench.store, agent):
            daemon.wait_for(training, validation, verbose=False)
        assert {(body["user"], body["temperature"]) for body in bench.fake.bodies()} == {
            ("train", 1.0),
            ("val", 0.0),
        }
        batch, metrics = daemon.training_batch(64, 64, "cpu", 1, training)
        validated = daemon.validate_batch(validation)
        daemon.end_batch(training)
        daemon.end_batch(validation)
    assert sorted(seen) == [(False, [2])] * 2 + [(True, [2])] * 4
    assert {entry.reward for entry in batch.rollouts} == {1.0}
    assert metrics["training/proxy/recorded"] == 4
    assert metrics["training/tokens/sampled"] == 4 * len(HELLO)
    assert (validated["val/n_rollouts"], validated["val/reward"]) == (2, 0.5)


def test_the_next_training_batch_runs_while_one_is_trained() -> None:
    """The end of one neither loses calls of the other nor ends its requests."""
    with daemon_bench() as bench:
        daemon = bench.daemon
        daemon.policy_version = 2
        first, second = begin(bench, is_train=True), begin(bench, is_train=True)
        with scripted_runners(bench.store, agent):
            daemon.wait_for(first, second, verbose=False)
            batch, metrics = daemon.training_batch(64, 64, "cpu", 1, first)
            daemon.end_batch(first)
            daemon.policy_version = 3
            third = begin(bench, is_train=True)
            daemon.wait_for(third, verbose=False)
        following, following_metrics = daemon.training_batch(64, 64, "cpu", 2, second)
        last, last_metrics = daemon.training_batch(64, 64, "cpu", 3, third)
    for each, version in ((batch, 2), (following, 2), (last, 3)):
        assert len(each.rollouts) == 4
        assert set(each.columns["policy_version_max_list"]) == {version}
    counts = [
        each.get("training/proxy/recorded", 0)
        for each in (metrics, following_metrics, last_metrics)
    ]
    assert sum(counts) == 12, "each call is in the counts of one step"
    sampled = sum(
        each["training/tokens/sampled"] for each in (metrics, following_metrics, last_metrics)
    )
    assert sampled == bench.fake.sampled


def test_a_batch_that_ends_gives_up_its_own_rollouts_alone() -> None:
    with daemon_bench() as bench:
        first, second = begin(bench, is_train=True), begin(bench, is_train=True)
        bench.daemon.end_batch(first)
        bench.daemon.end_batch(first)
        with scripted_runners(bench.store, agent):
            bench.daemon.wait_for(second, verbose=False)
        batch, _ = bench.daemon.training_batch(64, 64, "cpu", 1, second)
        assert {entry.rollout_id for entry in batch.rollouts} == set(second.rollout_ids)
        assert len(bench.fake.requests) == 4


def test_an_error_in_one_batch_ends_the_wait_for_all() -> None:
    def fail(rollout: Any) -> None:
        raise LookupError("a hook failed")

    with daemon_bench() as bench:
        batches = [begin(bench, is_train=True) for _ in range(2)]
        bench.daemon.rollout_finished = fail
        with (
            scripted_runners(bench.store, agent),
            pytest.raises(LookupError, match="a hook failed"),
        ):
            bench.daemon.wait_for(*batches, verbose=False)


def test_a_batch_beside_the_synchronous_one() -> None:
    """`clear_data_and_server` ends the data of `set_up_data_and_server` alone."""
    with daemon_bench() as bench:
        beside = begin(bench, is_train=False)
        bench.enqueue(2)
        with scripted_runners(bench.store, agent):
            bench.daemon.run_until_all_finished(verbose=False)
            bench.rows()
            bench.daemon.clear_data_and_server()
            bench.daemon.wait_for(beside, verbose=False)
        assert bench.daemon.validate_batch(beside)["val/n_rollouts"] == 2
    assert isinstance(bench.daemon.llm_proxy, agentlightning.LLMProxy)
