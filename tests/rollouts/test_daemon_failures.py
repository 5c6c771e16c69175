"""Rollouts that fail, hang or never begin, and stores that break."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import pytest

import agl_fast
from agl_fast.verl.supervision.deadlines import default_deadlines
from agl_fast.verl.supervision.waits import Limit
from support.daemon_runs import (
    HELLO,
    LoopThread,
    daemon_bench,
    new_store,
    scripted_runners,
    waiting,
)
from support.running_proxy import wait_until

HASTY = replace(
    default_deadlines(), store_away=Limit(0.1), store_answer=Limit(0.2, "store_answer_seconds")
)


def second_fails(run) -> float:
    run.ask(run.input["question"])
    if run.input["question"] == "q1":
        raise RuntimeError("the agent crashed")
    return 1.0


def test_failed_rollouts_leave_their_group():
    with daemon_bench(failed_rollouts="skip") as bench:
        rows, metrics = bench.train(second_fails, 2)
        entries = bench.daemon.last_batch.rollouts
    assert len(rows) == len(entries) == 2
    assert {entry.status for entry in entries} == {"succeeded"}
    assert metrics["training/failed_rollouts"] == metrics["training/failed_rollouts/failed"] == 2
    assert metrics["training/skipped_rollouts"] == 2
    assert metrics["training/skipped_tokens"] == 2 * len(HELLO)
    assert metrics["training/reward"] == 1.0


def test_failed_rollouts_count_with_reward_zero():
    def emits_and_fails(run) -> float:
        run.ask("a")
        run.emit(0.75)
        raise RuntimeError("the agent crashed")

    with daemon_bench(failed_rollouts="zero", train_rollout_n=1) as bench:
        rows, metrics = bench.train(emits_and_fails, 1)
        (entry,) = bench.daemon.last_batch.rollouts
    assert (entry.status, entry.reward, entry.has_reward) == ("failed", 0.0, True)
    assert entry.call_rewards is None
    assert rows.batch["token_level_scores"].sum() == 0
    assert metrics["training/failed_rollouts"] == 1
    assert metrics["training/skipped_rollouts"] == 0


@pytest.mark.parametrize(("failed_rollouts", "n_rollouts"), [("skip", 1), ("zero", 2)])
def test_rollouts_without_calls(failed_rollouts, n_rollouts):
    def second_is_silent(run) -> float:
        if run.input["question"] == "q0":
            run.ask("a")
        return 0.5

    with daemon_bench(failed_rollouts=failed_rollouts, train_rollout_n=1) as bench:
        rows, metrics = bench.train(second_is_silent, 2)
    assert len(rows) == 1
    assert metrics["training/n_rollouts"] == n_rollouts
    assert metrics["training/rollouts_without_calls"] == 1
    assert metrics["training/failed_rollouts"] == 0


def test_step_without_rows_says_what_happened():
    def fails(run) -> float:
        raise RuntimeError("the agent crashed")

    with (
        daemon_bench() as bench,
        pytest.raises(agl_fast.EmptyBatchError, match=r"none of 4 rollouts.*rollouts/failed': 4"),
    ):
        bench.train(fails, 2)


def test_step_after_an_empty_one():
    def fails_first(run) -> float:
        if run.input["question"] == "q0":
            run.ask("a", headers={"X-AGL-Train": "0"})
        else:
            run.ask("a")
        return 1.0

    with daemon_bench(failed_rollouts="zero", train_rollout_n=1) as bench:
        with pytest.raises(agl_fast.EmptyBatchError) as caught:
            bench.train(fails_first, 1)
        counted = caught.value.metrics
        assert counted["training/tokens/dropped/excluded"] == counted["training/tokens/sampled"] > 0
        assert (counted["training/n_rollouts"], counted["training/reward"]) == (1, 1.0)
        rows, _ = bench.train(fails_first, 2)
    assert len(rows) == 1


def test_overdue_rollouts_are_cancelled(monkeypatch, caplog):
    monkeypatch.setattr(waiting, "_IDLE_SECONDS", 0.1)
    released = threading.Event()

    def second_hangs(run) -> float:
        run.ask(run.input["question"])
        if run.input["question"] == "q1":
            assert released.wait(10)
        return 1.0

    with daemon_bench(train_rollout_n=1, rollout_deadline_seconds=0.5) as bench:
        bench.enqueue(2)
        with scripted_runners(bench.store, second_hangs):
            bench.daemon.run_until_all_finished()
            rollouts = asyncio.run(bench.store.query_rollouts())
            released.set()
        rows, metrics = bench.rows()
    assert sorted(rollout.status for rollout in rollouts) == ["cancelled", "succeeded"]
    assert len(rows) == 1
    assert metrics["training/failed_rollouts/deadline"] == 1
    assert metrics["training/skipped_tokens/failed"] == metrics["training/tokens/trained"] > 0
    assert "no rollout has begun or ended; 1 run, 0 wait for a runner" in caplog.text


def test_deadline_begins_with_the_rollout_not_in_the_queue():
    def slow(run) -> float:
        run.ask("a")
        time.sleep(0.3)
        return 1.0

    with daemon_bench(train_rollout_n=1, rollout_deadline_seconds=0.8) as bench:
        _, metrics = bench.train(slow, 4, runners=1)
    assert metrics["training/failed_rollouts"] == 0
    assert metrics["training/rollout_seconds/queued_max"] > 0.8


def test_store_s_own_time_limit_counts_as_failed():
    store = new_store()
    store._scan_debounce_seconds = 0

    def hangs(run) -> float:
        run.ask("a")
        time.sleep(0.5)
        return 1.0

    settings = {"llm_timeout_seconds": 0.2, "failed_rollouts": "zero", "train_rollout_n": 1}
    with daemon_bench(store=store, **settings) as bench:
        _, metrics = bench.train(hangs, 1)
    assert metrics["training/failed_rollouts/timeout"] == 1


def test_no_runner_takes_the_rollouts(monkeypatch, caplog):
    monkeypatch.setattr(waiting, "_IDLE_SECONDS", 0.1)
    with daemon_bench(rollout_deadline_seconds=0.3) as bench:
        bench.enqueue(2)
        with pytest.raises(TimeoutError, match="no runner took any of 4 queued rollouts"):
            bench.daemon.run_until_all_finished()
    assert "no rollout has begun or ended; 0 run, 4 wait for a runner" in caplog.text


def test_rollout_cancelled_by_someone_else():
    with daemon_bench(train_rollout_n=1, failed_rollouts="zero") as bench:
        bench.enqueue(2)
        first = asyncio.run(bench.store.query_rollouts())[0]
        asyncio.run(bench.store.update_rollout(first.rollout_id, status="cancelled"))
        with scripted_runners(bench.store, second_fails):
            bench.daemon.run_until_all_finished()
        _, metrics = bench.rows()
        first, second = bench.daemon.last_batch.rollouts
    assert (first.status, first.reward, first.n_calls) == ("cancelled", 0.0, 0)
    assert second.status == "failed"
    assert metrics["training/failed_rollouts"] == 2


@pytest.mark.parametrize("method", ["wait_for_rollouts", "query_spans", "get_latest_attempt"])
def test_store_error_is_raised_with_its_cause(method):
    store = new_store()

    async def breaks(*args, **kwargs):
        raise ConnectionError("the database is gone")

    with daemon_bench(store=store, deadlines=HASTY) as bench:
        bench.enqueue(1)
        setattr(store, method, breaks)
        with (
            scripted_runners(store, second_fails),
            pytest.raises(RuntimeError, match=r"the store failed to .*database is gone") as caught,
        ):
            bench.daemon.run_until_all_finished()
        assert isinstance(caught.value.__cause__, ConnectionError)


def test_store_that_does_not_answer():
    store = new_store()

    async def hangs(*args, **kwargs):
        await asyncio.sleep(60)

    with daemon_bench(store=store, deadlines=HASTY) as bench:
        bench.enqueue(1)
        store.wait_for_rollouts = hangs
        with pytest.raises(
            TimeoutError,
            match=r"took more than 0\.2 s \(.*store_answer_seconds\) to list finished rollouts",
        ):
            bench.daemon.run_until_all_finished()


def test_store_that_forgets_a_rollout():
    store = new_store()

    async def forgets(rollout_id):
        return None

    with daemon_bench(store=store) as bench:
        bench.enqueue(1)
        store.get_rollout_by_id = forgets
        with pytest.raises(RuntimeError, match="no longer knows rollout 'ro-"):
            bench.daemon.run_until_all_finished()


def test_ids_of_other_batches_are_ignored_and_counted():
    store = new_store()
    wait = store.wait_for_rollouts
    others: list[str] = []

    async def names_others(rollout_ids, timeout):
        known = await wait(rollout_ids=[*rollout_ids, *others], timeout=timeout)
        others.clear()
        return known

    with daemon_bench(store=store, train_rollout_n=1) as bench:
        bench.enqueue(1)
        stale = bench.daemon._batch.running
        foreign = asyncio.run(store.enqueue_rollout("not ours"))
        asyncio.run(store.update_rollout(foreign.rollout_id, status="succeeded"))
        bench.daemon.clear_data_and_server()
        others.extend([*stale, foreign.rollout_id])
        store.wait_for_rollouts = names_others
        rows, metrics = bench.train(second_fails, 1)
    assert len(rows) == 1
    assert metrics["training/stale_rollouts"] == metrics["training/unknown_rollouts"] == 1


def test_cleared_rollouts_are_cancelled_and_not_run():
    asked = []

    def remembers(run) -> float:
        asked.append(run.input["question"])
        run.ask("a")
        return 1.0

    with daemon_bench(train_rollout_n=1) as bench:
        bench.enqueue(3)
        bench.daemon.clear_data_and_server()
        rollouts = asyncio.run(bench.store.query_rollouts())
        assert {rollout.status for rollout in rollouts} == {"cancelled"}
        bench.train(remembers, 1)
    assert asked == ["q0"]


def test_stop_ends_everything_although_the_store_is_gone():
    store = new_store()

    async def breaks(*args, **kwargs):
        raise ConnectionError("the database is gone")

    before = set(threading.enumerate())
    with daemon_bench(store=store, deadlines=HASTY) as bench:
        bench.enqueue(1)
        store.update_rollout = breaks
        with pytest.raises(RuntimeError, match="cancel rollout 'ro-"):
            bench.daemon.stop()
        assert not bench.daemon.llm_proxy.is_running()
        names = ("agl_fast-daemon", "agl-fast-proxy")
        wait_until(lambda: not {each.name for each in {*threading.enumerate()} - before} & {*names})


def test_check_ends_the_wait():
    def server_died() -> None:
        raise ConnectionError("vLLM server 0 died")

    with daemon_bench(check=server_died) as bench:
        bench.enqueue(1)
        with pytest.raises(ConnectionError, match="died"):
            bench.daemon.run_until_all_finished()
        bench.daemon.clear_data_and_server()


def test_servers_that_are_gone_fail_the_rollouts():
    def asks(run) -> float:
        answer = run.client.post(
            run.llm.get_base_url(run.rollout.rollout_id, run.attempt_id) + "/chat/completions",
            json={"model": run.llm.model, "messages": []},
        )
        if answer.status_code >= 500:
            raise RuntimeError(answer.text)
        return 1.0

    with daemon_bench() as bench:
        bench.enqueue(1)
        bench.fake.stop()
        with scripted_runners(bench.store, asks):
            bench.daemon.run_until_all_finished()
        with pytest.raises(agl_fast.EmptyBatchError, match="'training/proxy/server_errors': 2"):
            bench.rows()


def test_interrupted_wait_leaves_nothing_running():
    async def endless() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    def interrupt() -> None:
        raise KeyboardInterrupt

    ended = threading.Event()
    loop = LoopThread("test-loop")
    with pytest.raises(KeyboardInterrupt):
        loop.run(endless(), what="waiting", meanwhile=interrupt)
    assert ended.wait(5)
    with pytest.raises(TimeoutError, match=r"waiting did not finish within 0\.1 s"):
        loop.run(asyncio.sleep(60), what="waiting", limit=Limit(0.1))
    loop.stop()
    with pytest.raises(RuntimeError, match="stopped"):
        loop.run(asyncio.sleep(0), what="waiting")
