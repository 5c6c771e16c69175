"""`python -m agl_fast dry-run AGENT TASKS ENDPOINT`."""

from __future__ import annotations

import argparse
import importlib
import inspect
import runpy
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from agl_fast.commands.wrong_input import wrong_input

# Options that `dry_run` takes under the same name.
_OF_DRY_RUN = (
    "rollouts_per_sample",
    "n_runners",
    "model",
    "api_key",
    "level",
    "max_prompt_length",
    "max_response_length",
    "temperature",
    "record",
)


def run(options: argparse.Namespace) -> int:
    """Run an agent on tasks of a file, and print what training would make of its calls."""
    parser = options.parser
    source, _, name = options.agent.rpartition(":")
    if not source or not name.isidentifier():
        parser.error("expected AGENT as FILE.py:NAME or MODULE:NAME")
    for path in (source, options.tasks):
        if path.endswith((".py", ".parquet", ".json", ".jsonl")) and not Path(path).is_file():
            parser.error(f"{path}: expected a file, there is none")
    # Only now: Agent-lightning and transformers take seconds to load.
    from agl_fast.commands.dataset_files import load_samples
    from agl_fast.tools.dry_run import dry_run

    passed_on = {name: getattr(options, name) for name in _OF_DRY_RUN}
    with wrong_input(parser, ValueError):
        tasks = list(islice(load_samples(options.tasks, "TASKS"), options.n_tasks))
        if options.tokenizer is not None:
            from transformers import AutoTokenizer

            passed_on["tokenizer"] = AutoTokenizer.from_pretrained(options.tokenizer)
    with wrong_input(parser, ImportError, AttributeError):
        agent = _load(source, name)
    with wrong_input(parser, ValueError, TypeError):
        print(dry_run(agent, tasks, options.endpoint, **passed_on))
    return 0


def _load(source: str, name: str) -> Any:
    """Import the agent; a class is instantiated without arguments."""
    if source.endswith(".py"):
        sys.path.insert(0, str(Path(source).resolve().parent))
        found = runpy.run_path(source).get(name)
    else:
        sys.path.insert(0, "")
        found = getattr(importlib.import_module(source), name, None)
    if found is None:
        raise AttributeError(f"{source} has no {name!r}")
    return found() if inspect.isclass(found) else found


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run an agent as training would, without Ray, a trainer or a GPU, and show its rows, "
        "rewards and what would go wrong (docs/verl.md)."
    )
    parser.add_argument("agent", metavar="AGENT", help="FILE.py:NAME or MODULE:NAME")
    parser.add_argument("tasks", metavar="TASKS", help=".parquet, .json or .jsonl")
    parser.add_argument(
        "endpoint", metavar="ENDPOINT", help="an OpenAI-compatible server that returns token ids"
    )
    parser.add_argument("--n-tasks", type=int, default=8, help="of TASKS (default: the first 8)")
    parser.add_argument("--rollouts-per-sample", type=int, default=1, help="default: 1")
    parser.add_argument("--n-runners", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--model", help="as the server calls it (default: its first)")
    parser.add_argument("--api-key", help="of the server")
    parser.add_argument(
        "--level", choices=("transition", "trajectory", "tree"), default="trajectory"
    )
    parser.add_argument("--max-prompt-length", type=int, default=2048, help="default: 2048")
    parser.add_argument("--max-response-length", type=int, default=8192, help="default: 8192")
    parser.add_argument("--temperature", type=float, default=1.0, help="of training (default: 1)")
    parser.add_argument("--tokenizer", help="distinguish retokenised text from rewritten history")
    parser.add_argument("--record", metavar="FILE", help="a new file for the recording")
