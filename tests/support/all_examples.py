"""A run with the tasks and agents of all examples, for test_examples: one start of Ray and vLLM.

`python all_examples.py --steps N --runs FOLDER`, as every example.
"""

from __future__ import annotations

import itertools
from typing import Any

import agl_fast
from examples import calculator, multi_agent, openai_agents, sql_agent
from examples.running import Example, main

MODULES = (calculator, sql_agent, multi_agent, openai_agents)
HOOKS = {"multi_agent": multi_agent.train_the_clerk, "sql_agent": sql_agent.train_the_writer}


def tasks(n: int, seed: int) -> list[dict[str, Any]]:
    """Those of the examples in turn."""
    each = n // len(MODULES)
    of_modules = [
        [task | {"example": module.EXAMPLE.name} for task in module.tasks(each, seed)]
        for module in MODULES
    ]
    return list(itertools.chain.from_iterable(zip(*of_modules, strict=True)))


async def answer(task: dict[str, Any], llm: Any) -> float:
    (module,) = (module for module in MODULES if module.EXAMPLE.name == task["example"])
    return await module.answer(task, llm)


def hook(rollout: agl_fast.Rollout) -> agl_fast.Rollout:
    name = rollout.sample["example"]
    return HOOKS[name](rollout) if name in HOOKS else rollout


EXAMPLE = Example(
    "all_examples",
    answer,
    tasks,
    [lesson for module in MODULES for lesson in module.EXAMPLE.lessons],
    {"rollout_hook": "all_examples:hook"},
)

if __name__ == "__main__":
    main(EXAMPLE)
