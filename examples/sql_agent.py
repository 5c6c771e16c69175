"""An agent that writes SQL, looks at what comes out, and rewrites it until it is content.

Two roles of one model: the writer writes and rewrites queries, the checker judges them. Only the
writer is trained: each call says in a header whose it is, and a hook reads that.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any

from openai import AsyncOpenAI

from examples.lessons import Lesson, Message
from examples.running import Example, main
from examples.sql_database import FAILURES, SCHEMA, a_question, is_same_answer, rows_of

if TYPE_CHECKING:
    from agentlightning import LLM

    from agl_fast import Rollout

MAX_QUERIES = 3
WRITER = f"Write one SQLite query that answers the question, and nothing else.\n{SCHEMA}"
CHECKER = f"Does the query answer the question? Say CORRECT, or what is wrong with it.\n{SCHEMA}"


async def answer(task: dict[str, Any], llm: LLM) -> float:
    """1.0 if the last query gives the right rows, else 0.0."""
    question = task["question"]
    async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none") as client:

        async def said(agent: str, messages: list[Message]) -> str:
            completion = await client.chat.completions.create(
                model=llm.model, messages=messages, extra_headers={"X-AGL-Agent": agent}
            )
            return completion.choices[0].message.content or ""

        messages = to_write(question)
        for further_queries in reversed(range(MAX_QUERIES)):
            written = await said("writer", messages)
            query = query_in(written)
            if not further_queries:
                break
            result = outcome(query)
            verdict = await said("checker", to_check(question, query, result))
            if verdict.strip().upper().startswith("CORRECT"):
                break
            messages += to_rewrite(written, result, verdict)
    return float(is_same_answer(query, task["query"]))


def train_the_writer(rollout: Rollout) -> Rollout:
    """For `agentlightning.rollout_hook`: what the checker says is context, not training data."""
    for call in rollout.calls:
        call.trainable = call.agent == "writer"
    return rollout


def to_write(question: str) -> list[Message]:
    return [{"role": "system", "content": WRITER}, {"role": "user", "content": question}]


def to_check(question: str, query: str, result: str) -> list[Message]:
    seen = f"{question}\nQuery: {query}\nResult: {result}"
    return [{"role": "system", "content": CHECKER}, {"role": "user", "content": seen}]


def to_rewrite(written: str, result: str, verdict: str) -> list[Message]:
    """How the writer's conversation goes on. All of it becomes one row."""
    seen = f"Result: {result}\nA colleague says: {verdict}\nWrite a better query."
    return [{"role": "assistant", "content": written}, {"role": "user", "content": seen}]


def query_in(text: str) -> str:
    """The query that an answer consists of, or has in a block of code."""
    block = re.search(r"```(?:sql)?\n(.*?)```", text, re.DOTALL | re.IGNORECASE)
    return block[1] if block else text


def outcome(query: str) -> str:
    """What the agent sees of a query: rows, or sqlite's error."""
    try:
        return repr(rows_of(query))
    except FAILURES as error:
        return f"error: {error}"


def tasks(n: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [a_question(rng) for _ in range(n)]


def a_draft(rng: random.Random) -> tuple[str, str, str]:
    """A question, its query, and what somebody wrote: that, or the query of another question."""
    task = a_question(rng)
    draft = task["query"] if rng.random() < 0.5 else a_question(rng)["query"]
    return task["question"], task["query"], draft


def writing(rng: random.Random) -> list[Message]:
    question, _, draft = a_draft(rng)
    return [*to_write(question), {"role": "assistant", "content": draft}]


def checking(rng: random.Random) -> list[Message]:
    question, query, draft = a_draft(rng)
    verdict = "CORRECT" if draft == query else "Wrong rows"
    return [
        *to_check(question, draft, outcome(draft)),
        {"role": "assistant", "content": verdict},
    ]


def rewriting(rng: random.Random) -> list[Message]:
    question, query, draft = a_draft(rng)
    return [
        *to_write(question),
        *to_rewrite(draft, outcome(draft), "Wrong rows"),
        {"role": "assistant", "content": query},
    ]


EXAMPLE = Example(
    "sql_agent",
    answer,
    tasks,
    [Lesson(writing), Lesson(checking), Lesson(rewriting)],
    {"rollout_hook": "examples.sql_agent:train_the_writer"},
)

if __name__ == "__main__":
    main(EXAMPLE)
