"""Events of a streamed answer, as vLLM sends them, field by field."""

from __future__ import annotations

from typing import Any


def chat(*values: float | None) -> dict[str, Any]:
    return {"content": [{"logprob": value} for value in values]}


def event(index: int = 0, **choice: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": index, **choice}]}


def role(index: int = 0) -> dict[str, Any]:
    first = event(index, delta={"role": "assistant", "content": ""})
    return {**first, "prompt_token_ids": [1, 2]} if index == 0 else first


def token(*ids: int, index: int = 0, text: str = "", **more: Any) -> dict[str, Any]:
    log_probs = chat(*(-0.5 for _ in ids))
    delta = {"content": text} if text else {}
    return event(index, token_ids=list(ids), logprobs=log_probs, delta=delta, **more)


def usage(n: int) -> dict[str, Any]:
    return {"id": "x", "choices": [], "usage": {"completion_tokens": n}}


def text(content: str, **more: Any) -> dict[str, Any]:
    return event(delta={"content": content}, **more)
