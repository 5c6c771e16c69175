"""`python -m agl_fast.verl.quickstart`: train a tiny model on a CPU, end to end, in minutes.

verl's RayPPOTrainer (FSDP2, Ray, vLLM's CPU server) learns a two-call task. Every batch is built by
`agl_fast.build_batch` from the token ids that vLLM returned. The run ends with an error unless the
reward rose, rollout and actor agreed at every step, and nothing is left running.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from agl_fast.verl.console import Console
from agl_fast.verl.leftovers import (
    RUN_VARIABLE,
    shared_memory_segments,
    stop_processes_of_run,
    unlink_abandoned_segments,
)

# The reward's mean over this many last steps is compared with that over as many first ones.
COMPARED_STEPS = 3
IMPORT_SECONDS = 300.0

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    # The actor and the server take turns on the same cores.
    "OMP_NUM_THREADS": "1",
    # Compiling vLLM's log-prob kernel takes longer than all the steps of this run.
    "TORCHDYNAMO_DISABLE": "1",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m agl_fast.verl.quickstart")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of run directories")
    parser.add_argument("--min-rise", type=float, default=0.2, help="reward must rise by this much")
    parser.add_argument("overrides", nargs="*", help="verl settings, as in `key.of.verl=value`")
    parser.add_argument("--verbose", action="store_true", help="show what verl, Ray and vLLM print")
    options = parser.parse_args()

    run_folder = options.runs.resolve() / time.strftime("quickstart-%Y%m%d-%H%M%S")
    run_folder.mkdir(parents=True)
    console = Console(run_folder, verbose=options.verbose)
    console.say(f"agl_fast quickstart, run directory {run_folder}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with nothing_left_behind(console, run_folder) as temporary:
            with console.phase("imports", IMPORT_SECONDS):
                # Only now: verl, Ray and vLLM read the environment when they are imported.
                from agl_fast.verl.loop import train
            reports = train(
                console,
                run_folder,
                temporary,
                steps=options.steps,
                overrides=options.overrides,
                verbose=options.verbose,
            )
        require_rise([report.reward for report in reports], options.min_rise)
    except (KeyboardInterrupt, SystemExit) as stop:
        console.say(f"\nstopped by {type(stop).__name__}; logs are in {run_folder}")
        return 1
    except Exception as error:
        traceback.print_exc(file=console.out)
        console.say(f"\nFAILED with {type(error).__name__}; logs are in {run_folder}")
        return 1
    console.say(f"reward {reports[0].reward:.3f} -> {reports[-1].reward:.3f}")
    return 0


@contextmanager
def nothing_left_behind(console: Console, run_folder: Path) -> Iterator[Path]:
    """Set the run's environment; afterwards end its processes and remove its shared memory.

    Yields:
        A temporary folder with a short path, as Ray's sockets need it. Ray's logs in it are copied
        to `run_folder`.

    Raises:
        RuntimeError: naming the processes or segments that could not be removed.
    """
    run_id = uuid4().hex
    (run_folder / "run_id").write_text(run_id)
    segments_before = shared_memory_segments()
    temporary = Path(tempfile.mkdtemp(prefix="agl-"))
    os.environ.update(ENVIRONMENT | {RUN_VARIABLE: run_id, "TMPDIR": str(temporary)})
    try:
        yield temporary
    finally:
        left = stop_processes_of_run(run_id) + unlink_abandoned_segments(segments_before)
        for logs in temporary.glob("session_2*/logs"):
            shutil.copytree(logs, run_folder / "ray-logs", dirs_exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        if left:
            raise RuntimeError(f"left behind: {', '.join(left)}")
        console.say("nothing is left running")


def require_rise(rewards: list[float], min_rise: float) -> None:
    """Raise RuntimeError unless the last rewards lie `min_rise` above the first ones."""
    n = min(COMPARED_STEPS, len(rewards))
    rise = (sum(rewards[-n:]) - sum(rewards[:n])) / n
    if not rise >= min_rise:
        raise RuntimeError(f"the reward rose by {rise:.3f}, expected {min_rise}")


if __name__ == "__main__":
    sys.exit(main())
