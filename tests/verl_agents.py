"""The two ways to write an agent for Agent-lightning, for a task of two calls."""

from __future__ import annotations

from typing import Any

import agentlightning
import openai

import two_call_task

MAX_TOKENS = 12


def asked(rollout: agentlightning.Rollout, model: str, messages: list[Any]) -> dict[str, Any]:
    """A request. In training it wants its own temperature, in validation it leaves that open."""
    request = {"model": model, "messages": messages, "max_tokens": MAX_TOKENS}
    return request | ({} if rollout.mode == "val" else {"temperature": 0.3})


@agentlightning.rollout
async def count(task: Any, llm: agentlightning.LLM, rollout: agentlightning.Rollout) -> float:
    """Reports its reward by returning it."""
    messages: list[Any] = []
    answers = []
    async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key="none") as client:
        for question in two_call_task.TwoCallTask(task["subject"]).questions():
            messages.append(question)
            completion = await client.chat.completions.create(**asked(rollout, llm.model, messages))
            answers.append(completion.choices[0].message.content or "")
            messages.append({"role": "assistant", "content": answers[-1]})
    return two_call_task.reward(answers)


class Counter(agentlightning.LitAgent[Any]):
    """Reports its reward by emitting it."""

    def rollout(
        self,
        task: Any,
        resources: agentlightning.NamedResources,
        rollout: agentlightning.AttemptedRollout,
    ) -> None:
        llm = resources["main_llm"]
        url = llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id)
        messages: list[Any] = []
        answers = []
        with openai.OpenAI(base_url=url, api_key="none") as client:
            for question in two_call_task.TwoCallTask(task["subject"]).questions():
                messages.append(question)
                completion = client.chat.completions.create(**asked(rollout, llm.model, messages))
                answers.append(completion.choices[0].message.content or "")
                messages.append({"role": "assistant", "content": answers[-1]})
        agentlightning.emit_reward(two_call_task.reward(answers))
