"""Every token that a server sampled for a training rollout is in exactly one count."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import httpx

from agl_fast.proxy.announced import AnnouncedRollout
from agl_fast.proxy.sampling import Phase
from agl_fast.rollouts.rollout_metrics import LOST_TOKENS
from support.daemon_runs import HELLO, daemon_bench, scripted_runners
from support.fake_openai_server import Answer
from support.running_proxy import say, wait_until


def counted(metrics: dict[str, Any]) -> float:
    """The left side of docs/rows.md, "Sampled tokens outside the batch"."""
    lost = sum(metrics[f"training/proxy/{name}"] for name in LOST_TOKENS)
    return metrics["training/tokens/sampled"] + metrics["training/skipped_tokens"] + lost


def test_the_counts_add_up_to_what_the_servers_sampled() -> None:
    late: list[tuple[str, dict[str, Any]]] = []

    def agent(run: Any) -> float:
        question = run.input["question"]
        run.ask(question)
        if question == "q0":  # a judge, a clash, a call recorded twice
            run.ask("judge", headers={"X-AGL-Train": "0"})
            for text in ("same", "same", "other"):
                run.ask(text)
        elif question == "q1":  # answers that cannot be a row; the agent goes on
            for text in ("five log-probs", "lost ids", "lost ids"):
                with contextlib.suppress(httpx.HTTPError):
                    run.ask(text, stream=text == "lost ids")
        elif question == "q2":
            raise RuntimeError("fails: its tokens are skipped")
        elif question == "q3":  # it leaves in the middle of a stream
            url = run.llm.get_base_url(run.rollout.rollout_id, run.attempt_id)
            body = {"model": run.llm.model, "messages": say("slow"), "stream": True}
            with run.client.stream("POST", f"{url}/chat/completions", json=body) as reply:
                next(reply.iter_raw())
            late.append((f"{url}/chat/completions", {**body, "messages": say("late")}))
        return 1.0

    def answer(request: Any) -> Answer:
        text = request.body["messages"][0]["content"]
        if text in ("same", "other"):
            return Answer(response_id="conv-7", token_ids=[len(text)] * 4)
        if text == "five log-probs":
            return Answer(token_ids=[1, 2, 3], usage=4)
        if text == "lost ids":
            return Answer(token_ids=[1, 2, 3], without=frozenset({"token_ids"}), usage=3)
        if text == "slow":
            return Answer(token_ids=range(100), chunk_delay=0.01)
        return Answer(text="hello", token_ids=HELLO)

    with daemon_bench(train_rollout_n=1) as bench:
        bench.fake.respond = answer
        bench.run(agent, 4)
        with httpx.Client(timeout=20.0) as client:  # its rollout has ended
            client.post(late[0][0], json=late[0][1]).raise_for_status()
            _, metrics = bench.rows()
            assert client.post(late[0][0], json=late[0][1]).status_code == 404
        first = bench.fake.sampled
        bench.run(lambda run: run.ask("validation") and 0.5, 2, is_train=False)
        validation = 2 * len(HELLO)
        _, following = bench.train(lambda run: run.ask("plain") and 0.5, 1)
        sampled = bench.fake.sampled - validation
    # The server counts the ids that it sent: what it says of a lost one in usage comes on top.
    n_lost_ids = 1
    slack = 2  # tokens that were under way when the agent left
    assert abs(counted(metrics) - (first + n_lost_ids)) <= slack
    assert counted(metrics) + counted(following) - (sampled + n_lost_ids) <= slack
    assert counted(following) == len(HELLO)
    assert metrics["training/tokens/dropped/excluded"] == len(HELLO)
    assert metrics["training/response_id_clashes"] == 1
    assert metrics["training/skipped_tokens/failed"] == len(HELLO)
    assert {name: metrics[f"training/proxy/{name}"] for name in LOST_TOKENS} == {
        **dict.fromkeys(LOST_TOKENS, 0),
        "duplicate_tokens": 4,
        "refused_tokens": 4,
        "late_tokens": len(HELLO),
        "client_gone_tokens": metrics["training/proxy/client_gone_tokens"],
    }
    assert metrics["training/proxy/client_gone_tokens"] > 0
    assert metrics["training/finish_reason/stop"] == 1.0
    assert metrics["training/n_recorded_calls"] == 4 + 3


def test_what_the_end_of_a_step_aborts_counts_in_that_step() -> None:
    """Whole answers do not tell how many tokens were sampled: the requests are counted."""
    n_requests = {"stream": 1, "whole": 2}
    threads: list[threading.Thread] = []

    def agent(run: Any) -> float:
        run.ask("quick")
        urls.append(run.llm.get_base_url(run.rollout.rollout_id, run.attempt_id))
        return 1.0

    def answer(request: Any) -> Answer:
        if request.body["messages"][0]["content"] == "quick":
            return Answer(token_ids=HELLO)
        if request.body.get("stream"):
            return Answer(token_ids=range(500), chunk_delay=0.1)
        return Answer(delay=30.0)

    def ask(url: str, stream: bool) -> None:
        body = {"model": "policy", "messages": say("slow"), "stream": stream}
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(f"{url}/chat/completions", json=body, timeout=20.0)

    urls: list[str] = []
    with daemon_bench(train_rollout_n=1) as bench:
        bench.fake.respond = answer
        bench.run(agent, 1)
        for kind, n in n_requests.items():
            for _ in range(n):
                threads.append(threading.Thread(target=ask, args=(urls[0], kind == "stream")))
                threads[-1].start()
        quick = len(HELLO)
        wait_until(lambda: len(bench.fake.requests) == 4 and bench.fake.sampled > quick + 3)
        _, metrics = bench.rows()
        sampled = bench.fake.sampled
        assert bench.fake.aborted == 3
        for thread in threads:
            thread.join(10)
        bench.daemon.clear_data_and_server()
        _, following = bench.train(lambda run: run.ask("quick") and 0.5, 1)
    assert metrics["training/proxy/aborted"] == 3
    assert metrics["training/proxy/unseen_answers"] == n_requests["whole"]
    # An event that was under way when its stream was cut off is not seen.
    assert sampled - n_requests["stream"] <= counted(metrics) <= sampled
    assert metrics["training/proxy/aborted_tokens"] == counted(metrics) - quick
    assert "training/proxy/aborted" not in following
    assert following["training/proxy/unseen_answers"] == 0
    assert counted(following) == quick


def test_calls_of_rollouts_that_nobody_enqueued_count_in_the_step() -> None:
    """A proxy that several programs share: its recorder is no daemon's alone."""
    with daemon_bench(train_rollout_n=1) as bench:
        bench.enqueue(1)
        proxy = bench.daemon.llm_proxy
        proxy._server.announced.others = AnnouncedRollout(Phase("train"))
        url = proxy.as_resource().get_base_url("ro-of-nobody", "at-1")
        body = {"model": "policy", "messages": say("hi")}
        httpx.post(f"{url}/chat/completions", json=body, timeout=20.0).raise_for_status()
        with scripted_runners(bench.store, lambda run: run.ask("hi") and 1.0):
            bench.daemon.run_until_all_finished(verbose=False)
        _, metrics = bench.rows()
    assert metrics["training/proxy/forgotten_tokens"] == len(HELLO)
    assert counted(metrics) == 2 * len(HELLO) == bench.fake.sampled
