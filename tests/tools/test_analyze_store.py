"""`python -m agl_fast analyze --store`: rollouts of Agent-lightning's store, over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu]")
pytest.importorskip("agentlightning", reason="needs the extra [cpu] or [verl]")

from agl_fast.__main__ import main
from agl_fast.tools.analyze.store import StoreError, read_store
from support.daemon_runs import agentlightning, new_store
from support.store_server import StoreServer, served

pytestmark = pytest.mark.filterwarnings("ignore")  # of litellm


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with served(new_store()) as found:
        yield found


def traced(number: int, prompt_ids: list[int] | None, response_ids: list[int] | None) -> Any:
    """As Agent-lightning's tracers write a call of openai's client."""
    ids = {"prompt_token_ids": prompt_ids, "response_token_ids": response_ids}
    attributes = {"gen_ai.response.id": f"chatcmpl-{number}"}
    attributes |= {name: value for name, value in ids.items() if value is not None}
    return {"name": "openai.chat.completion", "attributes": attributes}


def proxied(number: int, prompt_ids: list[int], response_ids: list[int]) -> Any:
    """As Agent-lightning's own LLM proxy writes it."""
    return {
        "name": "raw_gen_ai_request",
        "attributes": {
            "llm.hosted_vllm.id": f"chatcmpl-{number}",
            "llm.hosted_vllm.prompt_token_ids": str(prompt_ids),
            "llm.hosted_vllm.choices": str([{"token_ids": response_ids}]),
        },
    }


def rewarded(reward: float) -> Any:
    emitted = agentlightning.emit_reward(reward, propagate=False)
    return {"name": emitted.name, "attributes": emitted.attributes}


def run(store: Any, *spans: Any, status: str = "succeeded", data_id: str | None = None) -> None:
    """A rollout that ends with these spans, in order."""
    asyncio.run(_run(store, spans, status, data_id))


async def _run(store: Any, spans: Any, status: str, data_id: str | None) -> None:
    metadata = None if data_id is None else {"data_id": data_id}
    rollout = await store.start_rollout(input={"question": "a"}, metadata=metadata)
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    for number, fields in enumerate(spans, start=1):
        times = {"start_time": float(number), "end_time": number + 0.5}
        span = agentlightning.Span.from_attributes(**fields, **times, sequence_id=number, **ids)
        await store.add_span(span)
    await store.update_attempt(*ids.values(), status=status)


CALLS = [(1, [1, 2], [3]), (2, [1, 2, 3, 7], [4, 5])]


@pytest.mark.parametrize("write", [traced, proxied])
def test_calls_of_spans(server: StoreServer, write: Any) -> None:
    calls = [write(*call) for call in CALLS]
    run(server.store, calls[0], rewarded(0.25), calls[1], rewarded(0.5), data_id="s")
    run(server.store, rewarded(1.0), status="failed", data_id="s")
    traces = read_store(server.url, {"max_prompt_length": 9, "tree_max_tokens": None})
    assert traces.source == server.url
    assert traces.limits["transition"].max_prompt_length == 9
    assert traces.limits["tree"].tree_max_tokens is None
    by_status = {each.status: each for each in traces.rollouts}
    found = by_status["succeeded"]
    assert (found.data_id, found.reward) == ("s", 0.5)
    assert [(list(each.prompt_ids), list(each.response_ids)) for each in found.calls] == [
        call[1:] for call in CALLS
    ]
    assert (by_status["failed"].calls, by_status["failed"].reward) == ([], 1.0)


def test_calls_that_both_wrote_are_counted_once(server: StoreServer) -> None:
    """The tracer has no ids of streams, Agent-lightning's proxy may have them."""
    run(server.store, traced(1, [1, 2], [3]), proxied(1, [1, 2], [3]), traced(2, None, None))
    run(server.store, traced(3, None, None), proxied(3, [1, 2], [3]))
    traces = read_store(server.url)
    assert [len(each.calls) for each in traces.rollouts] == [1, 1]
    assert list(traces.notes) == ["1 calls without token ids are left out"]
    assert len({each.data_id for each in traces.rollouts}) == 2


def test_command(server: StoreServer, capsys: pytest.CaptureFixture[str]) -> None:
    run(server.store, *(traced(*call) for call in CALLS), rewarded(0.5))
    assert main(["analyze", "--store", server.url, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["statuses"] == {"succeeded": 1}
    assert [told["layouts"][level]["rows"] for level in told["layouts"]] == [2, 1, 1]


def test_a_store_without_token_ids(server: StoreServer) -> None:
    run(server.store, traced(1, None, None), rewarded(0.5))
    message = "none of the 1 calls of its 1 finished rollouts has token ids.*record_dir"
    with pytest.raises(StoreError, match=message):
        read_store(server.url)


def test_a_store_without_finished_rollouts(server: StoreServer) -> None:
    run(server.store, traced(1, [1], [2]), status="running")
    with pytest.raises(StoreError, match="has no finished rollout"):
        read_store(server.url)


def test_no_store(server: StoreServer) -> None:
    server.stop()
    with pytest.raises(ConnectionError, match=f"store='{server.url}' does not answer"):
        read_store(server.url)
