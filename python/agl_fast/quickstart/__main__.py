"""`python -m agl_fast.quickstart`: train an agent that uses a tool, end to end.

Without arguments: a tiny model that is made here, on the CPU, in minutes. With the environment
variables MODEL=name-or-folder and DEVICE=cuda: that model on GPUs, along the same path.
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
from typing import TYPE_CHECKING

from agl_fast.quickstart.console import Console

if TYPE_CHECKING:
    from agl_fast.quickstart.run_log import Played, RunLog

ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
CPU_ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # The actor and the server take turns on the same cores.
    "OMP_NUM_THREADS": "1",
}
IMPORT_SECONDS, MODEL_SECONDS = 300.0, 300.0
N_VALIDATION_SAMPLES = 16


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m agl_fast.quickstart")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--runs", type=Path, default=Path("quickstart"), help="of run directories and the report"
    )
    parser.add_argument(
        "--min-reward", type=float, default=0.8, help="validation reward that the run must reach"
    )
    parser.add_argument("--verbose", action="store_true", help="show what verl, Ray and vLLM print")
    options = parser.parse_args()
    model, device = os.environ.get("MODEL"), os.environ.get("DEVICE", "cpu")
    if device not in ("cpu", "cuda"):
        parser.error(f"DEVICE={device}: expected cpu or cuda")
    if device == "cuda" and model is None:
        parser.error("DEVICE=cuda: expected MODEL=name-or-folder as well")

    run_folder = options.runs.resolve() / time.strftime("%Y%m%d-%H%M%S")
    run_folder.mkdir(parents=True)
    os.environ.update(ENVIRONMENT | (CPU_ENVIRONMENT if device == "cpu" else {}))
    os.environ["VERL_FILE_LOGGER_PATH"] = str(run_folder / "metrics.jsonl")
    console = Console(run_folder, verbose=options.verbose)
    console.say(f"agl_fast quickstart, run directory {run_folder}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        reached = train(console, run_folder, model, options.steps, options.seed)
        if not reached >= options.min_reward:
            raise RuntimeError(
                f"validation reward {reached:.3f}, expected at least {options.min_reward}"
            )
    except (KeyboardInterrupt, SystemExit) as stop:
        console.say(f"\nstopped by {type(stop).__name__}; logs are in {run_folder}")
        return 1
    except Exception as error:
        traceback.print_exc(file=console.out)
        console.say(f"\nFAILED with {type(error).__name__}; logs are in {run_folder}")
        return 1
    return 0


def train(console: Console, run_folder: Path, model: str | None, steps: int, seed: int) -> float:
    """The whole run.

    Args:
        model: None: make the tiny one.

    Returns:
        The last validation reward.
    """
    with console.phase("imports", IMPORT_SECONDS):
        # Only now: verl, Ray and vLLM read the environment when they are imported.
        import torch

        from agl_fast.quickstart.agent import find_the_number
        from agl_fast.quickstart.boxes import samples
        from agl_fast.quickstart.memory import PeakMemory
        from agl_fast.quickstart.run_log import RunLog
        from agl_fast.quickstart.settings import SAMPLES_PER_STEP, verl_settings
        from agl_fast.quickstart.tiny_model import make_tiny_model
        from agl_fast.quickstart.training import train_agent
    with PeakMemory() as peak:
        log = RunLog(console.say, steps)
        if model is None:
            with console.phase("tiny model, tokenizer and supervised warm-up", MODEL_SECONDS):
                make_tiny_model(run_folder / "model", seed=seed)
            log.stage_ended("tiny model and warm-up")
        settings = verl_settings(
            run_folder,
            model=model,
            steps=steps,
            seed=seed,
            n_devices=max(1, torch.cuda.device_count()),
        )
        train_agent(
            find_the_number,
            settings,
            log,
            train_dataset=samples(steps * SAMPLES_PER_STEP, seed=seed),
            val_dataset=samples(N_VALIDATION_SAMPLES, seed=-1),
        )
        log.stage_ended("end")
    return report(console, run_folder, log, model or str(run_folder / "model"), peak.gib)


def report(
    console: Console, run_folder: Path, log: RunLog, model: str, peak_memory_gib: float
) -> float:
    """Print the tables and one rollout before and after, and write the report."""
    from transformers import AutoTokenizer

    from agl_fast.quickstart.report import plain_table, table_of, write_report
    from agl_fast.quickstart.trajectory import marked, pieces_of

    tokenizer = AutoTokenizer.from_pretrained(model)
    first, last = min(log.played), max(log.played)
    pair = most_improved(log.played[first], log.played[last])
    shown = {
        f"{when} training (reward {played.reward:g})": pieces_of(played, tokenizer)
        for when, played in zip(("Before", "After"), pair, strict=True)
    }
    for title, rows in shown.items():
        console.say(f"\n{title}; trained tokens stand between « and »\n{marked(rows)}")
    console.say(f"\n{plain_table(table_of(log, peak_memory_gib))}\n")
    for file in write_report(run_folder, log, shown, peak_memory_gib):
        shutil.copy(file, run_folder.parent)
        console.say(f"  {run_folder.parent / file.name}")
    return log.validations[last]


def most_improved(before: Sequence[Played], after: Sequence[Played]) -> tuple[Played, Played]:
    """The same sample before and after, where the reward rose most."""
    return max(zip(before, after, strict=True), key=lambda pair: pair[1].reward - pair[0].reward)


if __name__ == "__main__":
    sys.exit(main())
