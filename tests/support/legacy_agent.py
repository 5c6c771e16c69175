"""A client of mode v0 as users have it: Agent-lightning's legacy trainer and its default tracer.

Nothing here knows of agl_fast.

Args: the server's URL, and how many tasks to run.
"""

from __future__ import annotations

import sys

import agentlightning
import openai


def say(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


class Agent(agentlightning.LitAgent):
    def training_rollout(self, task, resources, rollout):
        llm = resources["main_llm"]
        with openai.OpenAI(base_url=llm.endpoint, api_key="none") as client:
            client.chat.completions.create(model=llm.model, messages=say(task["question"]))
            further = say(task["question"], "hello", "and?")
            client.chat.completions.create(model=llm.model, messages=further)
        return 0.75


if __name__ == "__main__":
    trainer = agentlightning.Trainer(n_workers=1, max_tasks=int(sys.argv[2]))
    trainer.fit_v0(Agent(), sys.argv[1])
