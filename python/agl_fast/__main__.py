"""`agl-fast`, or `python -m agl_fast`: one command line with sub-commands."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import NoReturn

from agl_fast import doctor
from agl_fast.commands import analyze, dry_run, export, join, quickstart, replay, train
from agl_fast.commands.train import is_setting
from agl_fast.verl.supervision.log_output import messages_shown

PROGRAM = "python -m agl_fast"
# Each module has `configure(parser)` and `run(options)`. Their imports are light: what a command
# needs (torch, verl) is imported when it runs.
COMMANDS = {
    "train": (train, "train a model; agents in other processes join (the default command)"),
    "join": (join, "run a script's agents as runners of such a run"),
    "replay": (replay, "rebuild rows, metrics and one step of a recording"),
    "analyze": (analyze, "estimate costs and losses of each level from recorded calls"),
    "dry-run": (dry_run, "show an agent's rows without a trainer or a GPU"),
    "export": (export, "convert a checkpoint to a Hugging Face directory"),
    "doctor": (doctor, "check this machine and print the install commands"),
    "quickstart": (quickstart, "train a tiny model on this machine"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line on stderr, without the usage, and exit status 2."""
        self.exit(2, f"{self.prog.removeprefix('python -m ')}: {message}\n")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = _Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [COMMAND] …\n       {PROGRAM} key=value …",
        epilog=f"{PROGRAM} COMMAND --help lists the options of a command.",
    )
    parser.add_argument("-V", "--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", prog=PROGRAM
    )
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, add_help=module is not quickstart)
        module.configure(command)
        command.set_defaults(parser=command, run=module.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line: `sys.argv` unless given.

    Returns:
        The exit status of the command.

    Raises:
        SystemExit: with status 2 and one line on stderr if the arguments, or a file that they name,
            are wrong; with status 0 after `--help`.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser()
    if words and is_setting(words[0]):
        words.insert(0, "train")
    if words and words[0] not in COMMANDS:
        _check_first_word(parser, words[0])
    options, left = parser.parse_known_args(words)
    if options.version:
        import agl_fast

        print(f"agl_fast {agl_fast.__version__}")
        return 0
    if options.command is None:
        parser.print_help()
        return 0
    if options.command == "quickstart":
        options.arguments = left
    elif hasattr(options, "settings") and all(map(is_setting, left)):
        options.settings += left  # those after an option, as in `replay FILE --seed 1 key=value`
    elif left:
        options.parser.error(f"unrecognized arguments: {' '.join(left)}")
    with messages_shown():
        status: int = options.run(options)
    return status


def _check_first_word(parser: argparse.ArgumentParser, word: str) -> None:
    if not word.startswith("-"):
        near = difflib.get_close_matches(word.lower(), COMMANDS, n=1, cutoff=0.5)
        meant = (
            f"did you mean {near[0]}?" if near else f"expected {', '.join(COMMANDS)}, or key=value"
        )
        parser.error(f"unknown command {word!r}; {meant}")
    if word not in ("-h", "--help", "-V", "--version"):
        parser.error(f"unknown option {word}; {PROGRAM} --help lists commands")


if __name__ == "__main__":
    sys.exit(main())
