"""Prints the rewards of rollouts whose runner is a process of its own, as JSON.

Agent-lightning's default tracer and a class-based agent. For test_span_export.
"""

from __future__ import annotations

import json
import socket
from typing import Any

import agentlightning
from agentlightning.emitter.reward import get_reward_value

import agl_fast.algorithm  # noqa: F401, which makes spans arrive; before agentlightning

WAIT_SECONDS = 60.0


class EmitTwice(agentlightning.LitAgent[float]):
    def rollout(self, task: float, resources: Any, rollout: Any) -> None:
        for part in (0.5, 1.0):
            agentlightning.emit_reward(part * task)


class FindRewards(agentlightning.Algorithm):
    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        store = self.get_store()
        llm = agentlightning.LLM(endpoint="http://127.0.0.1:1", model="none")
        await store.add_resources({"main_llm": llm})
        enqueued = [await store.enqueue_rollout(task) for task in train_dataset]
        ids = [each.rollout_id for each in enqueued]
        finished = await store.wait_for_rollouts(rollout_ids=ids, timeout=WAIT_SECONDS)
        assert {each.status for each in finished} == {"succeeded"}
        found = [
            [get_reward_value(span) for span in await store.query_spans(rollout_id)]
            for rollout_id in ids
        ]
        print(json.dumps([[each for each in rewards if each is not None] for rewards in found]))


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    agentlightning.Trainer(
        algorithm=FindRewards(),
        n_runners=1,
        runner={"type": "agentlightning.LitAgentRunner", "poll_interval": 0.1},
        strategy={"type": "cs", "server_port": port},
    ).fit(EmitTwice(), train_dataset=[2.0, 4.0])


if __name__ == "__main__":
    main()
