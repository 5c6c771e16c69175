"""Prints what the spans of a runner process tell in the store, as a line of JSON.

Agent-lightning's default tracer, which is AgentOps's, and two class-based agents in one: one emits
rewards, one calls a fake server with openai's clients. For test_span_export.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

import agentlightning
import openai
from agentlightning.emitter.reward import get_reward_value
from agentops.sdk.decorators import agent

import agl_fast.algorithm  # noqa: F401, which makes spans arrive; before agentlightning
from support.fake_openai_server import Answer, FakeOpenAIServer

WAIT_SECONDS = 60.0
PROMPT_IDS, RESPONSE_IDS = [1, 2, 3], [7, 8]
WAYS = ("sync", "sync stream", "async", "async stream")


class EmitOrAsk(agentlightning.LitAgent[Any]):
    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float | None:
        if isinstance(task, float):
            for part in (0.5, 1.0):
                agentlightning.emit_reward(part * task)
            return None
        llm = resources["main_llm"]
        await ask(task, {"base_url": llm.endpoint, "api_key": "none"})
        return 1.0


async def ask(way: str, server: dict[str, str]) -> None:
    request: dict[str, Any] = {
        "model": "policy",
        "messages": [{"role": "user", "content": way}],
        "logprobs": True,
        "extra_body": {"return_token_ids": True},
        "stream": "stream" in way,
        # As frameworks ask. AgentOps makes attributes of them.
        "max_tokens": None,
        "temperature": openai.omit,
    }
    if way.startswith("sync"):
        with openai.OpenAI(**server) as client:
            answer = client.chat.completions.create(**request)
            if request["stream"]:
                list(answer)
        return
    async with openai.AsyncOpenAI(**server) as client:
        if way in ("writer", "checker"):

            @agent(name=way)
            async def named() -> None:
                await client.chat.completions.create(**request)

            await named()
            return
        answer = await client.chat.completions.create(**request)
        if request["stream"]:
            async for _ in answer:
                pass


class Look(agentlightning.Algorithm):
    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        store = self.get_store()
        llm = agentlightning.LLM(endpoint=f"{self.url}/v1", model="policy")
        await store.add_resources({"main_llm": llm})
        enqueued = [await store.enqueue_rollout(task) for task in train_dataset]
        ids = [each.rollout_id for each in enqueued]
        finished = await store.wait_for_rollouts(rollout_ids=ids, timeout=WAIT_SECONDS)
        assert [each.status for each in finished] == ["succeeded"] * len(ids)
        spans = {each.input: await store.query_spans(each.rollout_id) for each in enqueued}
        found = {str(task): told(spans_of) for task, spans_of in spans.items()}
        print(json.dumps(found))


def told(spans: Sequence[Any]) -> dict[str, Any]:
    rewards = [get_reward_value(span) for span in spans]
    return {
        "rewards": [each for each in rewards if each is not None],
        "calls": [span.attributes for span in spans if span.name == "openai.chat.completion"],
        "triplets": [
            [triplet.prompt["token_ids"], triplet.response["token_ids"]]
            for triplet in agentlightning.TracerTraceToTriplet(agent_match="writer").adapt(spans)
        ],
    }


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with FakeOpenAIServer() as fake:
        fake.respond = lambda _: Answer(token_ids=RESPONSE_IDS, prompt_token_ids=PROMPT_IDS)
        agentlightning.Trainer(
            algorithm=Look(fake.url),
            n_runners=1,
            runner={"type": "agentlightning.LitAgentRunner", "poll_interval": 0.1},
            strategy={"type": "cs", "server_port": port},
        ).fit(EmitOrAsk(), train_dataset=[2.0, 4.0, *WAYS, "writer", "checker"])


if __name__ == "__main__":
    main()
