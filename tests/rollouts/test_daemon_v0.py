"""Mode v0: clients take tasks from Agent-lightning's legacy server and post triplets."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

import agl_fast
from support.daemon_runs import HELLO, SECONDS, Triplet, agentlightning, hello, new_daemon
from support.fake_openai_server import Answer, FakeOpenAIServer, prompt_ids_of
from support.paths import SUPPORT
from support.running_proxy import say, wait_until
from support.verl_settings import documented

LEGACY_AGENT = SUPPORT.joinpath("legacy_agent.py")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def client_of(port: int) -> Any:
    with pytest.warns(DeprecationWarning, match="is deprecated"):
        return agentlightning.AgentLightningClient(
            endpoint=f"http://127.0.0.1:{port}", poll_interval=0.02
        )


class Bench:
    """A fake server, and a daemon in mode v0 on a free port."""

    def __init__(self, fake: FakeOpenAIServer, **changes: Any) -> None:
        self.fake = fake
        self.port = free_port()
        self.daemon = new_daemon(None, mode="v0", port=self.port, **changes)
        self.daemon.start()
        self.client = client_of(self.port)

    def enqueue(self, n_samples: int = 1, *, is_train: bool = True) -> None:
        data = {"question": [f"q{i}" for i in range(n_samples)]}
        self.daemon.set_up_data_and_server(data, [self.fake.address], is_train)

    def serve(self, agent: Callable[[Any, Any], Any], n_tasks: int) -> None:
        """Run tasks on a thread, as a client's process would, and wait for all of the batch."""

        def work() -> None:
            for _ in range(n_tasks):
                task = self.client.poll_next_task()
                resources = self.client.get_resources_by_id(task.resources_id).resources
                rollout = agent(task, resources["main_llm"])
                if rollout is not None:
                    assert self.client.post_rollout(rollout) is not None

        thread = threading.Thread(target=work)
        thread.start()
        self.daemon.run_until_all_finished(verbose=False)
        thread.join(SECONDS)

    def post(self, **rollout: Any) -> httpx.Response:
        return httpx.post(
            f"http://127.0.0.1:{self.port}/rollout",
            content=json.dumps(rollout),
            headers={"Content-Type": "application/json"},
        )


@contextmanager
def v0_bench(**changes: Any) -> Iterator[Bench]:
    with FakeOpenAIServer() as fake:
        fake.respond = hello
        bench = Bench(fake, **{"train_rollout_n": 1, **changes})
        try:
            yield bench
        finally:
            bench.daemon.stop()


def ask(llm: Any, *texts: str) -> Triplet:
    """A call, and what a tracer makes of it."""
    assert type(llm) is agentlightning.LLM
    body = {"model": llm.model, "messages": say(*texts)}
    answer = httpx.post(f"{llm.endpoint}/chat/completions", json=body).raise_for_status().json()
    (choice,) = answer["choices"]
    log_probs = [{"logprob": each["logprob"]} for each in choice["logprobs"]["content"]]
    return Triplet(
        prompt={"token_ids": answer["prompt_token_ids"]},
        response={"token_ids": choice["token_ids"], "logprobs": log_probs},
        metadata={"response_id": answer["id"]},
    )


def converse(task: Any, llm: Any, reward: float | None = 1.0) -> Any:
    question = task.input["question"]
    triplets = [ask(llm, question), ask(llm, question, "hello", "and?")]
    return agentlightning.RolloutLegacy(
        rollout_id=task.rollout_id, final_reward=reward, triplets=triplets
    )


def client_of_algorithm(port: int) -> Any:
    algorithm = agl_fast.VERL(documented(agentlightning={"mode": "v0", "port": port}))
    with pytest.warns(DeprecationWarning, match="is deprecated") as warned:
        client = algorithm.get_client()
    assert "VERL.get_client is deprecated" in str(warned[0].message)
    client.poll_interval = 0.02
    return client


def test_a_round_trip_gives_rows():
    with v0_bench(train_rollout_n=2) as bench:
        bench.client = client_of_algorithm(bench.port)
        bench.daemon.policy_version = 3
        bench.enqueue(2)
        bench.serve(converse, 4)
        rows, metrics = bench.daemon.get_train_data_batch(64, 64, "cpu", 1)
        entries = bench.daemon.last_batch.rollouts
    assert rows.batch["response_mask"].sum(dim=1).tolist() == [2 * len(HELLO)] * 4
    prompts = [prompt_ids_of(say(f"q{i}")) for i in (0, 0, 1, 1)]
    assert rows.batch["prompts"].tolist() == prompts
    assert rows.batch["rollout_log_probs"].sum() == -0.5 * 8 * len(HELLO)
    assert [entry.reward for entry in entries] == [1.0] * 4
    assert metrics["training/proxy/unrecorded"] == 8
    assert metrics["training/failed_rollouts"] == 0
    # Training samples as the run says, and answers have ids, although no call names its rollout.
    assert {body["temperature"] for body in bench.fake.bodies()} == {1.0}
    assert all(body["return_token_ids"] and body["logprobs"] for body in bench.fake.bodies())


def test_a_validation():
    with v0_bench() as bench:
        bench.enqueue(2, is_train=False)
        bench.serve(lambda task, llm: converse(task, llm, 0.5), 2)
        metrics = bench.daemon.get_test_metrics()
    assert metrics["val/reward"] == 0.5
    assert metrics["val/turn_count"] == 2


@pytest.mark.slow
def test_the_legacy_trainer_s_own_tracer_finds_ids_and_log_probs():
    """In a process of its own that knows nothing of agl_fast."""
    with v0_bench(rollout_deadline_seconds=120.0) as bench:
        bench.enqueue(2)
        url = f"http://127.0.0.1:{bench.port}"
        offline = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        agent = subprocess.Popen([sys.executable, str(LEGACY_AGENT), url, "2"], env=offline)
        try:
            bench.daemon.run_until_all_finished(verbose=False)
        finally:
            agent.kill()
            agent.wait()
        rows, metrics = bench.daemon.get_train_data_batch(64, 64, "cpu", 1)
    assert rows.batch["response_mask"].sum(dim=1).tolist() == [2 * len(HELLO)] * 2
    assert rows.batch["rollout_log_probs"].sum() == -0.5 * 4 * len(HELLO)
    assert metrics["training/reward"] == 0.75


def test_an_agent_of_the_legacy_trainer():
    class Agent(agentlightning.LitAgent):
        def training_rollout(self, task, resources, rollout):
            return [ask(resources["main_llm"], task["question"])]

    class NoTracer(agentlightning.OtelTracer):
        def get_last_trace(self):
            return []

        @contextmanager
        def _trace_context_sync(self, **_):
            yield

    with v0_bench(reward_fillna_value=0.25) as bench:
        bench.enqueue(1)
        runner = agentlightning.runner.LegacyAgentRunner(
            Agent(), bench.client, NoTracer(), None, max_tasks=1
        )
        thread = threading.Thread(target=runner.iter)
        thread.start()
        bench.daemon.run_until_all_finished(verbose=False)
        thread.join(SECONDS)
        rows, metrics = bench.daemon.get_train_data_batch(64, 64, "cpu", 1)
    assert len(rows) == 1
    assert metrics["training/reward"] == 0.25


def test_a_task_that_nobody_posts_goes_to_the_next_client_and_the_first_post_counts():
    held: list[Any] = []

    def first_time_hangs(task: Any, llm: Any) -> Any:
        if not held:
            held.append(converse(task, llm, 0.75))
            return None
        return converse(task, llm, 0.5)

    with v0_bench(llm_timeout_seconds=0.3, rollout_deadline_seconds=SECONDS) as bench:
        bench.enqueue(1)
        bench.serve(first_time_hangs, 2)
        _, metrics = bench.daemon.get_train_data_batch(64, 64, "cpu", 1)
        bench.daemon.clear_data_and_server()
        assert bench.client.post_rollout(held[0]) is not None  # late
        assert bench.post(rollout_id="nobody's").status_code == 200
        bench.enqueue(1)
        bench.serve(converse, 1)
        _, following = bench.daemon.get_train_data_batch(64, 64, "cpu", 2)
    assert metrics["training/reward"] == 0.5
    assert metrics["training/discarded_attempts"] == 1
    assert following["training/reward"] == 1.0
    assert following["training/stale_rollouts"] + following["training/unknown_rollouts"] == 2


def test_a_client_that_never_posts():
    with v0_bench(rollout_deadline_seconds=0.4, failed_rollouts="zero") as bench:
        bench.enqueue(2)
        bench.serve(
            lambda task, llm: converse(task, llm) if task.input["question"] == "q1" else None, 2
        )
        _, metrics = bench.daemon.get_train_data_batch(64, 64, "cpu", 1)
        # The overdue task is in no queue any more.
        answer = httpx.get(f"http://127.0.0.1:{bench.port}/task").json()
    assert metrics["training/failed_rollouts/deadline"] == 1
    assert metrics["training/n_rollouts"] == 2
    assert answer["is_available"] is False


def test_no_client_at_all():
    with v0_bench(rollout_deadline_seconds=0.3) as bench:
        bench.enqueue(2)
        with pytest.raises(TimeoutError, match="no runner took any of 2 queued rollouts"):
            bench.daemon.run_until_all_finished()


def test_tasks_of_a_batch_that_was_given_up_are_not_run():
    questions = []

    def remembers(task: Any, llm: Any) -> Any:
        questions.append(task.input["question"])
        return converse(task, llm)

    with v0_bench() as bench:
        bench.enqueue(3)
        bench.daemon.clear_data_and_server()
        bench.enqueue(1)
        bench.serve(remembers, 1)
    assert questions == ["q0"]


def test_a_rollout_without_triplets_is_skipped_and_counted():
    def second_fails(task: Any, llm: Any) -> Any:
        if task.input["question"] == "q1":  # what the legacy runner posts after an exception
            return agentlightning.RolloutLegacy(rollout_id=task.rollout_id)
        return converse(task, llm)

    with v0_bench() as bench:
        bench.enqueue(2)
        bench.serve(second_fails, 2)
        rows, metrics = bench.daemon.get_train_data_batch(64, 64, "cpu", 1)
    assert len(rows) == 1
    assert metrics["training/rollouts_without_calls"] == 1
    assert metrics["training/skipped_rollouts/no_trainable_call"] == 1


def test_triplets_without_ids_name_what_to_look_at():
    def without_ids(task: Any, llm: Any) -> Any:
        triplet = Triplet(prompt={"token_ids": []}, response={"token_ids": []})
        return agentlightning.RolloutLegacy(rollout_id=task.rollout_id, triplets=[triplet])

    with v0_bench() as bench:
        bench.enqueue(1)
        with pytest.raises(ValueError, match=r"rollout 'rollout-.*return_token_ids"):
            bench.serve(without_ids, 1)


@pytest.mark.parametrize(("reward", "expected"), [(float("nan"), -1.0), (True, 1.0), (None, -1.0)])
def test_rewards(reward, expected):
    def posts_itself(task: Any, llm: Any) -> None:
        triplets = [ask(llm, "a").model_dump()]
        bench.post(rollout_id=task.rollout_id, final_reward=reward, triplets=triplets)

    with v0_bench(reward_fillna_value=-1.0) as bench:
        bench.enqueue(1)
        bench.serve(posts_itself, 1)
        _, metrics = bench.daemon.get_train_data_batch(64, 64, "cpu", 1)
    assert metrics["training/reward"] == expected


def test_an_infinite_reward_names_the_rollout():
    def posts_itself(task: Any, llm: Any) -> None:
        triplets = [ask(llm, "a").model_dump()]
        bench.post(rollout_id=task.rollout_id, final_reward=float("inf"), triplets=triplets)

    with v0_bench() as bench:
        bench.enqueue(1)
        bench.serve(posts_itself, 1)
        with pytest.raises(ValueError, match=r"rollout 'rollout-.*reward"):
            bench.daemon.get_train_data_batch(64, 64, "cpu", 1)


def test_malformed_posts_are_refused():
    with v0_bench() as bench:
        bench.enqueue(1)
        assert bench.post(final_reward=1.0).status_code == 422
        bench.serve(converse, 1)
        rows, _ = bench.daemon.get_train_data_batch(64, 64, "cpu", 1)
    assert len(rows) == 1


def test_errors_of_the_server_reach_the_agent():
    with v0_bench() as bench:
        bench.fake.answer_next(Answer(status=400))
        bench.enqueue(1)

        def refused(task: Any, llm: Any) -> Any:
            with pytest.raises(httpx.HTTPStatusError, match="400"):
                ask(llm, "a")
            return converse(task, llm)

        bench.serve(refused, 1)
        _, metrics = bench.daemon.get_train_data_batch(64, 64, "cpu", 1)
    assert metrics["training/proxy/client_errors"] == 1


def test_a_taken_port_names_the_key():
    with v0_bench() as bench:
        second = new_daemon(None, mode="v0", port=bench.port)
        with pytest.raises(OSError, match=f"agentlightning.port={bench.port} .*another port"):
            second.start()
        bench.enqueue(1)
        bench.serve(converse, 1)


def test_stop_frees_the_port_and_leaves_no_thread():
    before = set(threading.enumerate())
    with v0_bench() as bench:
        pass
    names = ("agl_fast-v0-server", "agl_fast-daemon", "agl-fast-proxy")
    wait_until(lambda: not {each.name for each in {*threading.enumerate()} - before} & {*names})
    with socket.create_server(("127.0.0.1", bench.port)):
        pass
    bench.daemon.stop()


def test_the_server_warns_where_others_reach_it(caplog):
    daemon = new_daemon(
        None,
        mode="v0",
        port=free_port(),
        proxy_settings={"host": "0.0.0.0", "api_key": "k", "advertise_host": "127.0.0.1"},
    )
    with warnings.catch_warnings():
        daemon.start()
    daemon.stop()
    assert "is unauthenticated" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"port": None}, "needs a port"),
        ({"store": object()}, "has no store"),
        ({"mode": "v2"}, "mode must be one of v0, v1"),
        ({"mode": "v1"}, "needs a LightningStore"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        new_daemon(**{"store": None, "mode": "v0", "port": 1, **arguments})


@pytest.mark.parametrize("value", [1e300, "-0.5", True, None])
def test_a_triplet_that_cannot_be_a_row_is_left_out(value):
    """It never ends a run: the rollout's other calls are trained. None: it has no ids."""

    def agent(task, llm):
        rollout = converse(task, llm)
        response = rollout.triplets[1].response
        if value is None:
            del response["token_ids"]
        else:
            response["logprobs"][0] = value
        return rollout

    with v0_bench() as bench:
        bench.client = client_of_algorithm(bench.port)
        bench.enqueue(1)
        bench.serve(agent, 1)
        rows, metrics = bench.daemon.get_train_data_batch(64, 64, "cpu", 1)
    assert rows.batch["response_mask"].sum(dim=1).tolist() == [len(HELLO)]
    assert metrics["training/proxy/refused_triplets"] == 1
