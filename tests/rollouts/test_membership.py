"""A run's store serves the run's own runners, and a runner knows which run it serves."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu]")

from agentlightning.types import RolloutConfig

import support.daemon_runs  # noqa: F401 - first: what it imports makes no noise there
from agl_fast.commands import join
from agl_fast.rollouts.batch_runner import rollout_requests
from agl_fast.verl.membership import (
    ROLLOUT_KEY,
    Guard,
    JoinRefused,
    RunIdentity,
    current_run,
    identity,
    require_free_port,
    run_at,
)
from agl_fast.verl.membership.identity import join_run, set_current_run, with_worker_names
from support.daemon_runs import (
    agentlightning,
    daemon_bench,
    new_daemon,
    new_store,
    scripted_runners,
)
from support.store_server import client_of, served

pytestmark = pytest.mark.filterwarnings("ignore:.*unclosed", "ignore::ResourceWarning")


@pytest.fixture
def run() -> RunIdentity:
    return RunIdentity.new(takes_joiners=False)


@pytest.fixture
def current(run: RunIdentity) -> Iterator[RunIdentity]:
    set_current_run(run)
    yield run
    set_current_run(None)


def test_a_store_gives_work_to_its_own_runners_alone(run: RunIdentity, caplog: Any) -> None:
    store = new_store()
    guard = Guard(store, run)
    guard.install()
    other = RunIdentity.new(takes_joiners=False)

    async def ask(ours: Any, plain: Any, of_other: Any) -> None:
        await store.enqueue_rollout({"task": 1})
        rollout = await store.enqueue_rollout({"task": 2})
        for foreign in (plain, of_other):
            for _ in range(2):
                assert await foreign.dequeue_rollout(worker_id="Worker-0") is None
            await foreign.update_worker("Worker-0", {})
            assert await foreign.dequeue_many_rollouts(limit=2, worker_id="Worker-0") == []
            with pytest.raises(Exception, match="500"):
                await foreign.start_attempt(rollout.rollout_id, worker_id="Worker-0")
        assert await plain.dequeue_rollout() is None
        assert list(await store.query_workers()) == []
        taken = await ours.dequeue_rollout(worker_id="Worker-0")
        assert taken.input == {"task": 1}
        assert run.owns(taken.attempt.worker_id)
        await ours.update_worker("Worker-0", {})
        (worker,) = await store.query_workers()
        assert worker.worker_id == taken.attempt.worker_id
        (more,) = await ours.dequeue_many_rollouts(limit=2, worker_id="Worker-1")
        assert more.input == {"task": 2}
        for client in (ours, plain, of_other):
            await client.close()

    def clients(server: Any) -> list[Any]:
        # Refusals that a client retries would take seconds.
        made = [agentlightning.LightningStoreClient(server.url, retry_delays=()) for _ in range(3)]
        with_worker_names(made[0], run)
        with_worker_names(made[2], other)
        return made

    with caplog.at_level(logging.WARNING, "agl_fast.verl.membership.guard"), served(store) as at:
        asyncio.run(ask(*clients(at)))
    said = [record.getMessage() for record in caplog.records if "asks this run" in record.msg]
    assert len(said) == len(guard.refused) == 3  # once each
    assert "Worker-0" in guard.refused
    assert all(str(run) in line and f"join --run {run.run_id}" in line for line in said)
    guard.remove()
    assert "dequeue_rollout" not in vars(store)


def test_a_join_serves_no_run_that_takes_the_port_of_its_store(
    run: RunIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that store was of no run."""
    store, second = new_store(), RunIdentity.new(takes_joiners=True)
    guard = Guard(store, second)
    monkeypatch.setattr(identity, "_is_known", False)
    with served(store) as server:
        watch = join._StoreWatch(("127.0.0.1", server.port), 1.0)
        guard.install()
        assert watch._successor() is None  # the runners have not asked yet
        for joined in (run, None):
            set_current_run(joined)
            assert watch._successor() == str(second)
        set_current_run(second)
        assert watch._successor() is None
        guard.remove()
        assert watch._successor() == "another program"
        set_current_run(None)
        assert watch._successor() is None


def test_a_store_that_driver_and_runners_share_knows_the_runners(run: RunIdentity) -> None:
    """Without `managed_store` a runner's store is a fork of the driver's, with its guard."""
    store = new_store()
    guard = Guard(store, run)
    guard.install()
    with_worker_names(store, run)

    async def work() -> None:
        await store.enqueue_rollout({"task": 1})
        taken = await store.dequeue_rollout(worker_id="Worker-0")
        assert run.owns(taken.attempt.worker_id)
        await store.update_worker("Worker-0", {})
        (worker,) = await store.query_workers()
        assert run.owns(worker.worker_id)

    asyncio.run(work())
    assert guard.refused == set()


def test_rollouts_that_a_dead_run_left_in_a_store_are_cancelled(
    current: RunIdentity, caplog: Any
) -> None:
    store = new_store()
    guard = Guard(store, current)
    guard.install()
    runner = current.worker_name("Worker-0")
    of_dead = {ROLLOUT_KEY: "dead"}

    async def work() -> None:
        left = [await store.enqueue_rollout({"old": i}, metadata=of_dead) for i in range(3)]
        (own,) = await store.enqueue_many_rollouts(
            rollout_requests([{"new": 0}], 1, "train", "latest", RolloutConfig())
        )
        assert own.metadata[ROLLOUT_KEY] == current.run_id
        of_nobody = await store.enqueue_rollout({"new": 1})
        taken = await store.dequeue_rollout(worker_id=runner)
        assert taken.rollout_id == own.rollout_id
        left.append(await store.enqueue_rollout({"old": 3}, metadata=of_dead))
        (taken,) = await store.dequeue_many_rollouts(limit=5, worker_id=runner)
        assert taken.rollout_id == of_nobody.rollout_id
        left.append(await store.enqueue_rollout({"old": 4}, metadata=of_dead))
        assert await store.dequeue_many_rollouts(limit=5, worker_id=runner) == []
        assert await store.dequeue_rollout(worker_id=runner) is None
        ended = [await store.get_rollout_by_id(rollout.rollout_id) for rollout in left]
        assert [rollout.status for rollout in ended] == ["cancelled"] * 5

    with caplog.at_level(logging.WARNING, "agl_fast.verl.membership.guard"):
        asyncio.run(work())
    said = [each.getMessage() for each in caplog.records if each.name.endswith("guard")]
    assert len(said) == 5
    assert all("is of another run, dead: it is cancelled" in line for line in said)
    guard.remove()


def test_a_store_says_whose_it_is(run: RunIdentity) -> None:
    store = new_store()
    with served(store) as server:
        assert run_at(server.url) is None
        guard = Guard(store, run)
        guard.install()
        assert run_at(server.url) == run
        assert join_run(server.url, run.run_id) == run
        with pytest.raises(JoinRefused, match="has runners of its own and takes no others"):
            join_run(server.url, None)
        with pytest.raises(JoinRefused, match="run 123 is not at http"):
            join_run(server.url, "123")
        with pytest.raises(OSError, match=r"expected a free port on 127.0.0.1") as taken:
            require_free_port("127.0.0.1", server.port, "some.key")
        assert f"{run} has it. Set another one: some.key" in str(taken.value)
        guard.remove()
        assert join_run(server.url, None) is None
        with pytest.raises(JoinRefused, match="a store of no run of agl_fast is there"):
            join_run(server.url, run.run_id)


def test_a_port_of_something_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        taken.close()
        require_free_port("127.0.0.1", port, "some.key")


def test_worker_names_are_unique_for_every_process(run: RunIdentity) -> None:
    script = (
        "import sys; from agl_fast.verl.membership.identity import RunIdentity; "
        "print(RunIdentity(sys.argv[1], '', False).worker_name('Worker-0'))"
    )
    names = [
        subprocess.run(
            [sys.executable, "-c", script, run.run_id], capture_output=True, text=True, check=True
        ).stdout.strip()
        for _ in range(2)
    ]
    names.append(run.worker_name("Worker-0"))
    assert len(set(names)) == 3
    assert run.worker_name("Worker-0") == names[2]
    assert all(run.owns(name) for name in names)
    assert all(re.fullmatch(r"Worker-0@[\w.-]+", name) for name in names)
    assert not run.owns("Worker-0")
    assert not run.owns(None)
    assert not RunIdentity.new(takes_joiners=False).owns(names[0])


def test_what_another_run_s_runner_did_is_not_trained(current: RunIdentity, caplog: Any) -> None:
    """Where the store is the user's, in a process of its own, and gives work to whoever asks."""
    store = new_store()
    with daemon_bench(store=store, train_rollout_n=1) as bench:
        dequeue, n_taken = store.dequeue_rollout, [0]

        async def by_either() -> Any:
            n_taken[0] += 1
            is_ours = n_taken[0] > 2
            return await dequeue(
                worker_id=current.worker_name("Worker-0") if is_ours else "Worker-0"
            )

        def agent(run: Any) -> float:
            is_ours = current.owns(run.rollout.attempt.worker_id)
            run.ask("ours" if is_ours else "foreign")
            return 1.0 if is_ours else 25.0

        bench.enqueue(2)
        store.dequeue_rollout = by_either
        with scripted_runners(store, agent, 1):
            bench.daemon.run_until_all_finished(verbose=False)
        rows, metrics = bench.rows()
    assert len(rows) == 2
    assert metrics["training/reward"] == 1.0
    assert metrics["training/foreign_rollouts"] == 2
    assert metrics["training/proxy/discarded"] == 2
    assert caplog.text.count("Runner 'Worker-0' took rollouts of run") == 1
    assert current_run() is current


def test_a_None_of_a_store_that_is_away_is_not_believed() -> None:
    store = new_store()
    with served(store) as server, client_of(server) as client:
        rollout = asyncio.run(store.enqueue_rollout({}))
        attempted = asyncio.run(store.dequeue_rollout())
        client._health_retry_delays = client._retry_delays = ()
        get, n_asked = client.get_latest_attempt, [0]

        async def as_if_away(rollout_id: str) -> Any:
            n_asked[0] += 1
            return None if n_asked[0] == 1 else await get(rollout_id)

        client.get_latest_attempt = as_if_away
        source = new_daemon(client)._source

        async def ask() -> Any:
            found = await source.latest_attempt(rollout.rollout_id)
            await client.close()
            return found

        found = asyncio.run(ask())
    assert found.attempt_id == attempted.attempt.attempt_id
