"""`python -m agl_fast.quickstart`: train an agent that uses a tool, end to end.

By default, a tiny model is created and trained on the CPU, in minutes. The environment variables
MODEL=name-or-folder and DEVICE=cuda train another model on GPUs. With LEVEL=transition, trajectory
or tree, the tiny model reasons before every answer, its chat template removes the reasoning from
the history, so that calls do not extend each other, and rows are built at that level.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from agl_fast.printable import table
from agl_fast.quickstart.console import Console, model_and_device, set_environment
from agl_fast.quickstart.run_log import Played, RunLog
from agl_fast.rows.levels import LEVELS, Level, LevelName

IMPORT_SECONDS, MODEL_SECONDS, UPDATES_SECONDS = 300.0, 600.0, 300.0
STEPS, REASONING_STEPS = 16, 20
MIN_REWARD, REASONING_MIN_REWARD = 0.8, 0.7
N_VALIDATION_SAMPLES = 16


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m agl_fast.quickstart")
    parser.add_argument("--steps", type=int, help="default: 16, with LEVEL 20")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path("quickstart"),
        help="folder of run directories and the report",
    )
    parser.add_argument(
        "--min-reward",
        type=float,
        help="validation reward below which the run fails (default: 0.8, with LEVEL 0.7)",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="show the output of verl, Ray and vLLM"
    )
    options = parser.parse_args(arguments)
    model, device = model_and_device(parser)
    level = os.environ.get("LEVEL")
    if level not in (None, *LEVELS):
        parser.error(f"LEVEL={level}: expected {', '.join(LEVELS)}")
    steps = options.steps or (STEPS if level is None else REASONING_STEPS)
    min_reward = options.min_reward
    if min_reward is None:
        min_reward = MIN_REWARD if level is None else REASONING_MIN_REWARD

    run_folder = options.runs.resolve() / time.strftime("%Y%m%d-%H%M%S")
    run_folder.mkdir(parents=True)
    set_environment(run_folder, device)
    console = Console(run_folder, verbose=options.verbose)
    console.say(f"agl_fast quickstart, run directory {run_folder}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        reached = train(console, run_folder, model, level, steps, options.seed)
        if not reached >= min_reward:
            raise RuntimeError(f"validation reward {reached:.3f}, expected at least {min_reward}")
    except (KeyboardInterrupt, SystemExit) as stop:
        console.say(f"\nstopped by {type(stop).__name__}; logs are in {run_folder}")
        return 1
    except Exception as error:
        traceback.print_exc(file=console.out)
        console.say(f"\nFAILED with {type(error).__name__}; logs are in {run_folder}")
        return 1
    return 0


def train(
    console: Console,
    run_folder: Path,
    model: str | None,
    level: LevelName | None,
    steps: int,
    seed: int,
) -> float:
    """Train, and report the results.

    Args:
        model: None: create the tiny model.
        level: None: trajectory, with a tiny model that does not reason.

    Returns:
        The last validation reward.
    """
    with console.phase("imports", IMPORT_SECONDS):
        # Imported here, as verl, Ray and vLLM read the environment when they are imported.
        import torch

        from agl_fast.quickstart.agent import find_the_number
        from agl_fast.quickstart.boxes import samples
        from agl_fast.quickstart.settings import SAMPLES_PER_STEP, verl_settings
        from agl_fast.quickstart.tiny_model import make_tiny_model
        from agl_fast.quickstart.training import PeakMemory, train_agent, update_seconds
    is_tiny, reasoning = model is None, level is not None
    with PeakMemory() as peak:
        log = RunLog(console.say, steps)
        if is_tiny:
            with console.phase("tiny model, tokenizer and supervised warm-up", MODEL_SECONDS):
                make_tiny_model(run_folder / "model", seed=seed, reasoning=reasoning)
            log.stage_ended("tiny model and warm-up")
        settings = verl_settings(
            run_folder,
            model=model,
            steps=steps,
            seed=seed,
            n_devices=max(1, torch.cuda.device_count()),
            level=level or "trajectory",
            reasoning=reasoning,
        )
        train_agent(
            find_the_number,
            settings,
            log,
            train_dataset=samples(steps * SAMPLES_PER_STEP, seed=seed),
            val_dataset=samples(N_VALIDATION_SAMPLES, seed=-1),
        )
        log.stage_ended("end")
        if is_tiny and reasoning:
            with console.phase("the first step's update at each level", UPDATES_SECONDS):
                log.update_seconds = update_seconds(run_folder)
            log.stage_ended("updates at each level")
    shown_level: LevelName = "trajectory"
    if level is not None and Level.of(level).is_tree:
        shown_level = "tree"
    return report(
        console, run_folder, log, model or str(run_folder / "model"), shown_level, peak.gib
    )


def report(
    console: Console,
    run_folder: Path,
    log: RunLog,
    model: str,
    level: LevelName,
    peak_memory_gib: float,
) -> float:
    """Print the table and one rollout before and after training, and write the report."""
    from transformers import AutoTokenizer

    from agl_fast.quickstart.report import (
        explain_row_counts,
        marked,
        pieces_of,
        table_of,
        write_report,
    )

    tokenizer = AutoTokenizer.from_pretrained(model)
    first, last = min(log.played), max(log.played)
    pair = most_improved(log.played[first], log.played[last])
    shown = {
        f"{when} training (reward {played.reward:g})": pieces_of(played, tokenizer, level)
        for when, played in zip(("Before", "After"), pair, strict=True)
    }
    for title, rows in shown.items():
        console.say(f"\n{title}; trained tokens are between « and »\n{marked(rows, level)}")
    console.say(f"\n{table(table_of(log, peak_memory_gib))}\n")
    console.say(f"{explain_row_counts(log, run_folder)}\n")
    for file in write_report(run_folder, log, shown, peak_memory_gib):
        shutil.copy(file, run_folder.parent)
        console.say(f"  {run_folder.parent / file.name}")
    return log.validations[last]


def most_improved(before: Sequence[Played], after: Sequence[Played]) -> tuple[Played, Played]:
    """The sample whose reward increased most, before and after training."""
    return max(zip(before, after, strict=True), key=lambda pair: pair[1].reward - pair[0].reward)


if __name__ == "__main__":
    sys.exit(main())
