"""Run the two-call task against vLLM servers over HTTP, keeping the token ids they return."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx

import agl_fast
from agl_fast.verl import two_call_task
from agl_fast.verl.two_call_task import Message, TwoCallTask

REQUEST_TIMEOUT = httpx.Timeout(60.0)


@dataclass(frozen=True)
class Sampling:
    """What a step samples, and with which policy."""

    model: str
    max_tokens: int
    temperature: float
    policy_version: int


async def run_tasks(
    tasks: Sequence[TwoCallTask], servers: Sequence[str], sampling: Sampling, *, group_size: int
) -> list[agl_fast.Rollout]:
    """Run every task `group_size` times; the rollouts of one task share a fresh data_id.

    Args:
        servers: `host:port` of each server; a rollout stays with one of them, whose prefix cache
            then holds its conversation.

    Raises:
        httpx.HTTPError: a request failed or took longer than `REQUEST_TIMEOUT`.
    """
    # One connection for every conversation: the servers do the queueing.
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT, limits=limits) as client:
        conversations: list[Coroutine[Any, Any, agl_fast.Rollout]] = []
        for task in tasks:
            data_id = uuid4().hex
            for _ in range(group_size):
                server = servers[len(conversations) % len(servers)]
                conversations.append(_converse(client, server, task, data_id, sampling))
        return list(await asyncio.gather(*conversations))


async def _converse(
    client: httpx.AsyncClient, server: str, task: TwoCallTask, data_id: str, sampling: Sampling
) -> agl_fast.Rollout:
    messages: list[Message] = []
    calls: list[agl_fast.Call] = []
    answers: list[str] = []
    for question in task.questions():
        messages.append(question)
        call, answer = await _complete(client, server, messages, sampling)
        messages.append({"role": "assistant", "content": answer})
        calls.append(call)
        answers.append(answer)
    return agl_fast.Rollout(uuid4().hex, data_id, calls, two_call_task.reward(answers))


async def _complete(
    client: httpx.AsyncClient, server: str, messages: list[Message], sampling: Sampling
) -> tuple[agl_fast.Call, str]:
    reply = await client.post(
        f"http://{server}/v1/chat/completions",
        json={
            "model": sampling.model,
            "messages": messages,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "logprobs": True,
            "return_token_ids": True,
        },
    )
    reply.raise_for_status()
    completion = reply.json()
    choice = completion["choices"][0]
    call = agl_fast.Call(
        completion["prompt_token_ids"],
        choice["token_ids"],
        [token["logprob"] for token in choice["logprobs"]["content"]],
        response_id=completion["id"],
        finish_reason=choice["finish_reason"],
        policy_version=sampling.policy_version,
    )
    return call, choice["message"]["content"] or ""
