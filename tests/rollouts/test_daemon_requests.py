"""Whose requests a run answers, and by which name its servers know the model."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from support.daemon_runs import AgentModeDaemon, daemon_bench, scripted_runners
from support.fake_openai_server import Answer, FakeOpenAIServer
from support.running_proxy import say, wait_until


def ask_for(run, rollout_id: str, attempt_id: str = "at-1", **body) -> httpx.Response:
    url = run.llm.get_base_url(rollout_id, attempt_id) + "/chat/completions"
    return run.client.post(url, json={"model": "policy", "messages": say("hi"), **body})


@pytest.mark.parametrize("is_train", [True, False])
def test_rollouts_that_nobody_enqueued_are_refused_and_counted(is_train):
    refused = []

    def agent(run) -> float:
        run.ask("a")
        refused.append(ask_for(run, "ro-of-another-run"))
        return 1.0

    with daemon_bench(train_rollout_n=1) as bench:
        bench.run(agent, 2, is_train=is_train)
        if is_train:
            _, metrics = bench.rows()
            assert metrics["training/proxy/unknown_rollouts"] == 2
            assert metrics["training/proxy/recorded"] == 2
        assert len(bench.fake.requests) == 2
    assert [each.status_code for each in refused] == [404, 404]
    assert "'ro-of-another-run'" in refused[0].json()["error"]["message"]


class Retries(AgentModeDaemon):
    def rollout_config(self):
        config = super().rollout_config()
        config.max_attempts = 2
        config.retry_condition = ["failed"]
        return config


def test_a_retry_is_served_and_an_earlier_batch_is_not():
    seen = []

    def first_attempt_fails(run) -> float:
        run.ask("a")
        seen.append((run.rollout.rollout_id, run))
        if run.rollout.attempt.sequence_id == 1:
            raise RuntimeError("the agent crashed")
        return 1.0

    with daemon_bench(train_rollout_n=1, daemon_cls=Retries) as bench:
        bench.run(first_attempt_fails, 1)
        (rollout_id, run), _ = seen
        with httpx.Client() as client:
            run.client = client
            assert ask_for(run, rollout_id).status_code == 200  # its batch runs still
            _, metrics = bench.rows()
            assert metrics["training/discarded_attempts"] == 1
            assert metrics["training/n_rollouts_w_reward"] == 1
            assert metrics["training/proxy/late"] == 1
            assert ask_for(run, rollout_id).status_code == 404
            bench.daemon.clear_data_and_server()
            assert ask_for(run, rollout_id).status_code == 404
            bench.enqueue(1)
            assert ask_for(run, rollout_id).status_code == 404
        counts = bench.daemon.llm_proxy.recorder.counts
    assert counts == {"unknown_rollouts": 1}


@pytest.mark.parametrize("is_train", [True, False])
@pytest.mark.parametrize(("asked", "said"), [("gpt-4o", "ask for 'policy'"), (None, "'served'")])
def test_a_batch_whose_calls_all_get_404_ends_the_run(is_train, asked, said):
    def agent(run) -> float:
        ask_for(run, run.rollout.rollout_id, run.attempt_id, model=asked or run.llm.model)
        return 0.0

    information = {"model": "policy", "temperature": 1.0, "served_model": "served"}
    with daemon_bench(train_rollout_n=1, train_information=information) as bench:
        bench.fake.respond = lambda request: Answer(status=404)
        with pytest.raises(RuntimeError, match=said) as caught:
            bench.run(agent, 2, is_train=is_train)
    assert "no call was answered, 2 of them with 404" in str(caught.value)


def test_one_agent_s_wrong_model_does_not_end_the_run():
    def agent(run) -> float:
        if run.input["question"] == "q0":
            ask_for(run, run.rollout.rollout_id, run.attempt_id, model="gpt-4o")
        else:
            run.ask("a")
        return 1.0

    def only_the_policy(request):
        return Answer(status=200 if request.body["model"] == "policy" else 404)

    with daemon_bench(train_rollout_n=1) as bench:
        bench.fake.respond = only_the_policy
        _, metrics = bench.train(agent, 2)
    assert metrics["training/proxy/unknown_models"] == 1
    assert metrics["training/rollouts_without_calls"] == 1


def test_servers_are_asked_by_their_own_name_and_agents_by_the_run_s():
    information = {"model": "some/model", "temperature": 1.0, "served_model": "served"}

    def agent(run) -> float:
        assert run.llm.model == "some/model"
        assert run.ask("a")["model"] == "served"
        return 1.0

    with daemon_bench(train_rollout_n=1, train_information=information) as bench:
        bench.train(agent, 1)
        assert {body["model"] for body in bench.fake.bodies()} == {"served"}


def test_calls_that_came_before_the_batch_was_known_wait_until_it_is():
    with FakeOpenAIServer() as fake, daemon_bench(train_rollout_n=1) as bench:
        bench.fake = fake
        enqueue = bench.daemon._source.enqueue

        async def agents_are_faster(requests):
            rollouts = await enqueue(requests)
            for rollout_id in (rollouts[0].rollout_id, "ro-x"):
                asking.append(asyncio.create_task(ask(rollout_id)))
            flights = bench.daemon.llm_proxy._server.flights
            await asyncio.to_thread(wait_until, lambda: len(list(flights)) == 2)
            assert fake.requests == []
            return rollouts

        async def ask(rollout_id):
            url = bench.daemon.llm_proxy.as_resource().get_base_url(rollout_id, "at-1")
            async with httpx.AsyncClient() as client:
                answer = await client.post(
                    url + "/chat/completions", json={"messages": say("hi")}, timeout=10
                )
            statuses.append(answer.status_code)

        asking: list[asyncio.Task[None]] = []
        statuses: list[int] = []
        bench.daemon._source.enqueue = agents_are_faster
        bench.enqueue(1)
        wait_until(lambda: len(statuses) == 2)
        with scripted_runners(bench.store, lambda run: run.ask("a") and 1.0):
            bench.daemon.run_until_all_finished(verbose=False)
        _, metrics = bench.rows()
    assert sorted(statuses) == [200, 404]
    assert metrics["training/proxy/unknown_rollouts"] == 1
    assert metrics["training/proxy/discarded_tokens"] == 3  # its attempt was another one
    assert metrics["training/n_rollouts"] == 1
