"""The two ways to write an agent for Agent-lightning, for a task of two calls."""

from __future__ import annotations

import contextlib
import zlib
from typing import Any

import agentlightning
import openai

from support import two_call_task

MAX_TOKENS = 12


def asked(rollout: agentlightning.Rollout, model: str, messages: list[Any]) -> dict[str, Any]:
    """A request. In training it wants its own way of sampling, in validation it leaves that open.

    One id for the whole conversation, and a seed for each rollout.
    """
    request = {"model": model, "messages": messages, "max_tokens": MAX_TOKENS}
    if rollout.mode == "val":
        return request
    name = rollout.rollout_id
    return request | {
        "temperature": 0.3,
        "seed": zlib.crc32(name.encode()),
        "extra_body": {"request_id": name, "thinking_token_budget": 3},
    }


def score(client: openai.OpenAI, model: str, text: str) -> float:
    """The mean log-prob of a text, of an answer that samples nothing."""
    scored = client.completions.create(
        model=model, prompt=text, echo=True, max_tokens=0, logprobs=1, temperature=1.0
    )
    choice = scored.choices[0]
    assert choice.text == text
    log_probs = [each for each in choice.logprobs.token_logprobs if each is not None]
    return sum(log_probs) / len(log_probs)


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
    """Reports its reward by emitting it.

    In training it asks for two answers to its last question and goes by the first. It scores the
    question, too, and asks for an echo of it, which training refuses.
    """

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
                request = asked(rollout, llm.model, messages)
                if rollout.mode != "val" and answers:
                    request["n"] = 2
                completion = client.chat.completions.create(**request)
                answers.append(completion.choices[0].message.content or "")
                messages.append({"role": "assistant", "content": answers[-1]})
            if rollout.mode != "val":
                assert score(client, llm.model, messages[0]["content"]) < 0
                with contextlib.suppress(openai.BadRequestError):
                    client.completions.create(model=llm.model, prompt="a", echo=True, max_tokens=2)
                    raise AssertionError("an echo beside sampled tokens is refused in training")
        agentlightning.emit_reward(two_call_task.reward(answers))
