"""`agl-fast`, or `python -m agl_fast`: one command line with sub-commands."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module

USAGE = """\
python -m agl_fast key=value …                train; agents in other processes join the store
python -m agl_fast join SCRIPT                a script's agents as runners of such a run
python -m agl_fast replay FILE [key=value …]  rows, metrics and one step of a recording
python -m agl_fast analyze FILE …             what each level of rows would cost and lose
python -m agl_fast dry-run AGENT TASKS URL    an agent's rows, without a trainer or a GPU
python -m agl_fast export CKPT OUT            a Hugging Face directory from a checkpoint
python -m agl_fast doctor                     what keeps this machine from training
python -m agl_fast quickstart                 a tiny model learns on this machine
python -m agl_fast COMMAND --help             the options of a command
python -m agl_fast --version
"""
TRAIN_USAGE = """\
usage: python -m agl_fast [train] key=value …

Train a model on samples from files, behind Agent-lightning's store. Agents join from processes of
their own: python -m agl_fast join --port 4747 my_agent.py

  key=value   a key of verl or agl_fast, as hydra reads it
  +key=value  a key that only your own code reads

Keys that every run needs:
  actor_rollout_ref.model.path=…            the model: a folder, or a name on the Hugging Face hub
  data.train_files=…                        .parquet, .json or .jsonl; [a,b]: several files

Keys that most runs set, with their defaults:
  data.val_files=null                       samples to validate on
  data.train_batch_size=1024                samples of a step
  data.max_prompt_length=512                tokens
  data.max_response_length=512              tokens of an answer
  algorithm.adv_estimator=gae               grpo, rloo, …: without a critic
  actor_rollout_ref.rollout.n=1             rollouts of each sample
  actor_rollout_ref.actor.ppo_mini_batch_size=256
                                            samples of an update
  agentlightning.trace_aggregator.level=transition
                                            what a row is: transition, trajectory, tree
  agentlightning.record_dir=null            a folder that gets all rollouts
  agentlightning.store_port=4747            of the store, on the host AGL_SERVER_HOST (localhost)
  trainer.total_epochs=30                   passes over the samples
  trainer.save_freq=-1                      steps from one checkpoint to the next; -1: none

All keys: docs/configuration.md
"""
# Exit status where the command line, or a file that it names, is wrong.
WRONG_USAGE = 2

# By name: the module whose `main` takes the arguments after the name. `train` may be left out.
COMMANDS = {
    "train": "agl_fast.commands.train",
    "join": "agl_fast.commands.join",
    "replay": "agl_fast.commands.replay",
    "analyze": "agl_fast.commands.analyze",
    "dry-run": "agl_fast.commands.dry_run",
    "export": "agl_fast.commands.export",
    "doctor": "agl_fast.doctor",
    "quickstart": "agl_fast.quickstart.__main__",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line: `sys.argv` unless given.

    Returns:
        The exit status: 2 where the arguments are wrong, after one line that says how.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if arguments[0] in ("-V", "--version"):
        import agl_fast

        print(f"agl_fast {agl_fast.__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        if not _is_setting(name):
            return _refuse(name)
        name, rest = "train", list(arguments)
    if name == "train":
        return _train(rest)
    # Each loads what it needs, which takes seconds.
    status: int = import_module(COMMANDS[name]).main(rest)
    return status


def _train(arguments: Sequence[str]) -> int:
    """verl takes half a minute to load: what is no setting is found before."""
    if any(each in ("-h", "--help") for each in arguments):
        print(TRAIN_USAGE, end="")
        return 0
    for argument in arguments:
        if not _is_setting(argument):
            return _refuse_argument(f"{argument!r}: expected key=value")
    status: int = import_module(COMMANDS["train"]).main(arguments)
    return status


def _is_setting(argument: str) -> bool:
    """`key=value`, `+key=value`, or `~key`, which says itself that it is not taken."""
    return ("=" in argument.lstrip("-") and not argument.startswith("-")) or argument[0:1] == "~"


def _refuse(name: str) -> int:
    if name.startswith("-"):
        return _refuse_argument(f"unknown option {name}; python -m agl_fast --help lists commands")
    near = difflib.get_close_matches(name.lower(), COMMANDS, n=1, cutoff=0.5)
    meant = f"did you mean {near[0]}?" if near else f"expected {', '.join(COMMANDS)}, or key=value"
    return _refuse_argument(f"unknown command {name!r}; {meant}")


def _refuse_argument(message: str) -> int:
    print(f"agl_fast: {message}", file=sys.stderr)
    return WRONG_USAGE


if __name__ == "__main__":
    sys.exit(main())
