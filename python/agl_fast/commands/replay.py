"""`python -m agl_fast replay FILE`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from agl_fast.commands.wrong_input import wrong_input

_LEVEL = "agentlightning.trace_aggregator.level"


def main(arguments: Sequence[str]) -> int:
    """Print what became of a recording."""
    parser = argparse.ArgumentParser(
        prog="python -m agl_fast replay",
        description="Build the rows of a recording and show their metrics; with --model, take the "
        "step that the run took, without agents.",
    )
    parser.add_argument("file", help="a recording (docs/recording.md)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change")
    parser.add_argument("--model", help="folder of the weights that the step begins with")
    parser.add_argument("--reference", help="folder of the reference policy (default: --model)")
    parser.add_argument("--level", help=_LEVEL)
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: 0)")
    options = parser.parse_intermixed_args(list(arguments))
    # Only now: verl takes half a minute to load. A file that cannot be read is found before.
    from agl_fast.recording import RecordingError, read_recording

    with wrong_input("replay", RecordingError):
        read_recording(options.file)

    from omegaconf import OmegaConf

    from agl_fast.commands.overrides import parse_overrides
    from agl_fast.tools.replay import replay

    with wrong_input("replay", ValueError, TypeError):
        overrides = OmegaConf.create(parse_overrides(options.overrides))
        if options.level is not None:
            OmegaConf.update(overrides, _LEVEL, options.level, force_add=True)
        print(
            replay(
                options.file,
                OmegaConf.to_container(overrides),
                model=options.model,
                reference=options.reference,
                seed=options.seed,
            )
        )
    return 0
