"""How every example is run: `python -m examples.NAME` trains a tiny model, on the CPU.

With the environment variables MODEL=name-or-folder and DEVICE=cuda: that model, on GPUs.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agl_fast.quickstart.console import Console, model_and_device, set_environment
from examples.lessons import Lesson

MODEL_SECONDS = 600.0
# What the tiny model can see: as long as an example's longest conversation, in its own tokens.
TINY_PROMPT_WIDTH, TINY_RESPONSE_WIDTH, TINY_ANSWER = 512, 512, 48
N_VALIDATION_SAMPLES = 8


@dataclass(frozen=True)
class Example:
    """An agent and what it takes to train it.

    Attributes:
        name: its module's.
        agent: a coroutine function of `task` and `llm` (Agent-lightning's resource: endpoint,
            api_key, model) that returns the reward.
        tasks: makes so many tasks from a seed. Each is a dict; its `data_source` gives it
            validation metrics of its own.
        lessons: what the tiny model is taught before; a model of yours speaks already.
        agentlightning: settings of that group which the example needs.
    """

    name: str
    agent: Callable[[Any, Any], Awaitable[float]]
    tasks: Callable[[int, int], list[dict[str, Any]]]
    lessons: Sequence[Lesson]
    agentlightning: Mapping[str, Any] = field(default_factory=dict)


def main(example: Example) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m examples.{example.name}")
    parser.add_argument("--steps", type=int, default=8, help="training steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the model and of the tasks")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of run folders")
    parser.add_argument("--verbose", action="store_true", help="show what verl, Ray and vLLM print")
    options = parser.parse_args()
    model, device = model_and_device(parser)

    run_folder = options.runs.resolve() / f"{example.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    run_folder.mkdir(parents=True)
    set_environment(run_folder, device)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console(run_folder, verbose=options.verbose)
    console.say(f"{example.name}: metrics, log, recordings and checkpoint go to {run_folder}")
    train(example, console, run_folder, model=model, steps=options.steps, seed=options.seed)


def train(
    example: Example,
    console: Console,
    run_folder: Path,
    *,
    model: str | None,
    steps: int,
    seed: int,
) -> None:
    """Train `model`; None: a tiny one that is made in the run's folder."""
    # Only now: verl, Ray and vLLM read the environment when they are imported.
    import agentlightning as agl

    from agl_fast.quickstart.run_log import RunLog
    from agl_fast.quickstart.settings import SAMPLES_PER_STEP
    from agl_fast.quickstart.training import train_agent
    from examples.lessons import make_model

    if model is None:
        with console.phase("tiny model, tokenizer and supervised warm-up", MODEL_SECONDS):
            make_model(
                run_folder / "model",
                example.lessons,
                max_length=TINY_PROMPT_WIDTH + TINY_RESPONSE_WIDTH,
                seed=seed,
            )
    train_agent(
        agl.rollout(example.agent),
        settings(example, run_folder, model=model, steps=steps, seed=seed),
        RunLog(console.say, steps),
        train_dataset=example.tasks(steps * SAMPLES_PER_STEP, seed),
        val_dataset=example.tasks(N_VALIDATION_SAMPLES, -1),
    )


def settings(
    example: Example, run_folder: Path, *, model: str | None, steps: int, seed: int
) -> dict[str, Any]:
    """The dictionary for `VERL`: the quickstart's, and what the example needs."""
    import torch

    from agl_fast.quickstart.settings import verl_settings

    found = verl_settings(
        run_folder,
        model=model,
        steps=steps,
        seed=seed,
        n_devices=max(1, torch.cuda.device_count()),
    )
    found["trainer"] |= {"experiment_name": example.name, "save_freq": steps}  # the last one
    found["agentlightning"] |= example.agentlightning
    if model is None:
        found["data"]["max_prompt_length"] = TINY_PROMPT_WIDTH
        found["data"]["max_response_length"] = TINY_ANSWER
        found["actor_rollout_ref"]["rollout"]["max_model_len"] = (
            TINY_PROMPT_WIDTH + TINY_RESPONSE_WIDTH
        )
        found["agentlightning"]["trace_aggregator"] |= {
            "trajectory_max_prompt_length": TINY_PROMPT_WIDTH,
            "trajectory_max_response_length": TINY_RESPONSE_WIDTH,
        }
    return found
