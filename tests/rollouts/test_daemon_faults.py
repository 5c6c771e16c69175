"""Strange rewards, refused prompts, replicas that die, and two runs on one machine."""

from __future__ import annotations

import asyncio
import errno
import itertools
import threading
from contextlib import ExitStack

import httpx
import pytest

import agl_fast
from support.daemon_runs import (
    HELLO,
    MismatchLog,
    daemon_bench,
    hello,
    new_store,
    scripted_runners,
)
from support.fake_openai_server import Answer, FakeOpenAIServer, prompt_ids_of
from support.running_proxy import say
from support.store_server import client_of, served

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("reward", "expected", "n_with_reward"),
    [(None, -1.0, 0), (NAN, -1.0, 0), (True, 1.0, 4), (False, 0.0, 4)],
)
def test_every_reward_is_strange(reward, expected, n_with_reward):
    def agent(run):
        run.ask("a")
        return reward

    with daemon_bench(reward_fillna_value=-1.0) as bench:
        rows, metrics = bench.train(agent, 2)
        bench.run(agent, 2, is_train=False)
        validation = bench.daemon.get_test_metrics()
    assert len(rows) == 4
    assert rows.batch["token_level_scores"].sum(dim=1).tolist() == [expected] * 4
    assert metrics["training/reward"] == validation["val/reward"] == expected
    assert metrics["training/n_rollouts_w_reward"] == n_with_reward
    assert validation["val/n_rollouts_w_reward"] == n_with_reward / 2


@pytest.mark.parametrize(
    ("value", "named"),
    [(b"\xff", r"b'\\xff' of type bytes"), (object(), "of type object"), ("\ud800", "of type str")],
)
def test_a_sample_that_no_runner_would_get(value, named):
    """The store would hand the rollout out and then fail to send it: it would stay unanswered."""
    store = new_store()
    with served(store) as server, client_of(server) as client, daemon_bench(store=client) as bench:
        with pytest.raises(TypeError, match=rf"sample 1 of the batch: image=.*{named}: expected"):
            bench.enqueue(2, image=["a path", value])
        assert asyncio.run(store.query_rollouts()).total == 0
    with daemon_bench() as bench:  # runners in this process get the object itself
        rows, _ = bench.train(lambda run: run.ask("a") and 1.0, 2, image=["a path", value])
        assert len(rows) == 4


@pytest.mark.parametrize("reward", [INFINITY, -INFINITY])
def test_every_reward_is_infinite(reward):
    def agent(run):
        run.ask("a")
        return reward

    with daemon_bench() as bench, pytest.raises(ValueError, match=r"rollout 'ro-.*reward"):
        bench.train(agent, 2)


def test_all_rollouts_fail_and_the_next_step_is_whole():
    def fails(run) -> float:
        run.ask("a")
        raise RuntimeError("the agent crashed")

    def works(run) -> float:
        run.ask("a")
        return 1.0

    with daemon_bench() as bench:
        with pytest.raises(agl_fast.EmptyBatchError) as caught:
            bench.train(fails, 2)
        assert f"'training/skipped_tokens/failed': {4 * len(HELLO)}" in str(caught.value)
        counted = caught.value.metrics
        assert (
            counted["training/failed_rollouts"] == counted["training/failed_rollouts/failed"] == 4
        )
        assert counted["training/skipped_tokens"] == 4 * len(HELLO)
        assert counted["training/n_rollouts"] == 0
        assert "training/reward" not in counted
        rows, metrics = bench.train(works, 2)
    assert len(rows) == 4
    assert metrics["training/failed_rollouts"] == metrics["training/skipped_tokens"] == 0


TOO_LONG = {
    "error": {
        "message": "This model's maximum context length is 8 tokens. However, you requested 9",
        "type": "BadRequestError",
        "code": 400,
    }
}


@pytest.mark.parametrize("agent_gives_up", [True, False])
def test_prompts_that_the_server_refuses(agent_gives_up):
    """What was sampled before counts, unless the agent fails over it; the refusal is counted."""

    def agent(run) -> float:
        run.ask("a")
        with pytest.raises(httpx.HTTPStatusError, match="400") as refused:
            run.ask("a", "hello", "b" * 99)
        assert "maximum context length" in refused.value.response.text
        if agent_gives_up:
            raise RuntimeError("the prompt is too long")
        return 0.5

    def answer(request):
        if len(request.body["messages"]) == 3:
            return Answer(status=400, error_body=TOO_LONG)
        return hello(request)

    with daemon_bench(train_rollout_n=1, failed_rollouts="zero") as bench:
        bench.fake.respond = answer
        rows, metrics = bench.train(agent, 1)
    assert len(rows) == 1
    assert metrics["training/proxy/client_errors"] == 1
    assert metrics["training/failed_rollouts"] == int(agent_gives_up)
    assert metrics["training/reward"] == (0.0 if agent_gives_up else 0.5)
    assert metrics["training/tokens/trained"] == len(HELLO)


def test_an_agent_does_not_see_that_a_replica_dies():
    """Its request moves to the other replica before the first byte of an answer."""
    dead = threading.Event()

    def agent(run) -> float:
        run.ask(run.input["question"])
        if dead.is_set() or run.input["question"] != "q0":
            run.ask(run.input["question"], "hello", "and?")
            return 1.0
        used = first if first.requests else second
        used.stop()
        dead.set()
        run.ask(run.input["question"], "hello", "and?")
        return 1.0

    with FakeOpenAIServer() as first, FakeOpenAIServer() as second:
        first.respond = second.respond = hello
        second._ids = itertools.count(1000)  # vLLM's ids differ from server to server
        with daemon_bench(train_rollout_n=1) as bench:
            data = {"question": ["q0", "q1", "q2"]}
            addresses = [first.address, second.address]
            bench.daemon.set_up_data_and_server(data, addresses, True)
            with scripted_runners(bench.store, agent, 1):
                bench.daemon.run_until_all_finished(verbose=False)
            rows, metrics = bench.rows()
    assert len(rows) == 3
    assert metrics["training/failed_rollouts"] == 0
    assert metrics["training/proxy/recorded"] == 6
    assert metrics["training/proxy/moved"] >= 1
    assert rows.batch["response_mask"].sum(dim=1).tolist() == [2 * len(HELLO)] * 3


def test_a_port_of_the_proxy_that_is_taken_is_an_error():
    with FakeOpenAIServer() as other, daemon_bench(proxy_settings={"port": other.port}) as bench:
        with pytest.raises(OSError, match=rf"agentlightning\.proxy\.port={other.port}"):
            bench.enqueue(1)
        assert bench.daemon._batch is None


def test_a_full_disk_ends_the_mismatch_log_and_not_the_run(tmp_path, monkeypatch, caplog):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    def rewrites(run) -> float:
        run.ask("a")
        run.ask("b", "hello", "c")
        return 1.0

    monkeypatch.setattr(MismatchLog, "write", full)
    settings = {"level": "trajectory", "debug": True, "mismatch_log_dir": str(tmp_path)}
    with daemon_bench(trace_aggregator=settings, train_rollout_n=1) as bench:
        for _ in range(2):
            rows, _ = bench.train(rewrites, 1)
            assert len(rows) == 2
    assert caplog.text.count("only counted from here on") == 1


def test_two_runs_on_one_machine():
    """Ports of their own, and no call of one in the other; one that stops leaves the other."""
    with ExitStack() as stack:
        benches = [stack.enter_context(daemon_bench(train_rollout_n=2)) for _ in range(2)]
        texts = ("first run", "second run")

        def agent_of(text):
            def agent(run) -> float:
                run.ask(text)
                return 1.0

            return agent

        found = [None, None]

        def train(index: int) -> None:
            found[index] = benches[index].train(agent_of(texts[index]), 4)

        threads = [threading.Thread(target=train, args=(index,)) for index in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for (rows, metrics), text in zip(found, texts, strict=True):
            assert rows.batch["prompts"].tolist() == [prompt_ids_of(say(text))] * 8
            assert metrics["training/proxy/recorded"] == 8
        assert len({bench.daemon.llm_proxy._port for bench in benches}) == 2
        benches[0].daemon.stop()
        rows, _ = benches[1].train(agent_of("alone"), 1)
        assert len(rows) == 2
