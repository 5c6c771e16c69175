"""Every token that a server sampled for a training rollout is in exactly one count."""

from __future__ import annotations

import contextlib
from typing import Any

import httpx

from agl_fast.rollouts.rollout_metrics import LOST_TOKENS
from support.daemon_runs import HELLO, daemon_bench
from support.fake_openai_server import Answer
from support.running_proxy import say


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
        _, metrics = bench.train(agent, 4)
        first = bench.fake.sampled
        with httpx.Client(timeout=20.0) as client:  # its rollout has ended
            client.post(late[0][0], json=late[0][1]).raise_for_status()
        bench.run(lambda run: run.ask("validation") and 0.5, 2, is_train=False)
        validation = 2 * len(HELLO)
        _, following = bench.train(lambda run: run.ask("plain") and 0.5, 1)
        sampled = bench.fake.sampled - validation
    # The server counts the ids that it sent: what it says of a lost one in usage comes on top.
    n_lost_ids = 1
    slack = 2  # tokens that were under way when the agent left
    assert abs(counted(metrics) - (first + n_lost_ids)) <= slack
    assert counted(metrics) + counted(following) - (sampled + n_lost_ids) <= slack
    assert counted(following) == 2 * len(HELLO)
    assert metrics["training/tokens/dropped/excluded"] == len(HELLO)
    assert metrics["training/response_id_clashes"] == 1
    assert metrics["training/skipped_tokens/failed"] == len(HELLO)
    assert {name: metrics[f"training/proxy/{name}"] for name in LOST_TOKENS} == {
        **dict.fromkeys(LOST_TOKENS, 0),
        "duplicate_tokens": 4,
        "refused_tokens": 4,
        "client_gone_tokens": metrics["training/proxy/client_gone_tokens"],
    }
    assert metrics["training/proxy/client_gone_tokens"] > 0
    assert following["training/proxy/late_tokens"] == len(HELLO)
    assert metrics["training/finish_reason/stop"] == 1.0
    assert metrics["training/n_recorded_calls"] == 4 + 3
