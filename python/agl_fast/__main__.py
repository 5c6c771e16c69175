"""`python -m agl_fast`: train, join, replay, analyze, export."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

USAGE = """\
python -m agl_fast key=value …                train; agents in other processes join the store
python -m agl_fast join SCRIPT                a script's agents as runners of such a run
python -m agl_fast replay FILE [key=value …]  rows, metrics and one step of a recording
python -m agl_fast analyze FILE …             what each level of rows would cost and lose
python -m agl_fast export CKPT OUT            a Hugging Face directory from a checkpoint
python -m agl_fast.doctor                     what keeps this machine from training
python -m agl_fast.quickstart                 a tiny model learns on this machine
"""


def main(arguments: Sequence[str]) -> int:
    """Exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    command, *rest = arguments
    return _command(command)(
        rest if command in ("join", "replay", "analyze", "export") else arguments
    )


def _command(name: str) -> Callable[[Sequence[str]], int]:
    # Each loads what it needs, which takes seconds.
    if name == "join":
        from agl_fast.commands import join

        return join.main
    if name == "replay":
        from agl_fast.commands import replay

        return replay.main
    if name == "analyze":
        from agl_fast.commands import analyze

        return analyze.main
    if name == "export":
        from agl_fast.commands import export

        return export.main
    from agl_fast.commands import train

    return train.main


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
