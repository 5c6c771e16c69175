"""`python -m agl_fast replay FILE`."""

from __future__ import annotations

import argparse

from agl_fast.commands.wrong_input import wrong_input

_LEVEL = "agentlightning.trace_aggregator.level"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Build the rows of a recording and show their metrics; with --model, repeat the training "
        "step, without agents."
    )
    parser.add_argument("file", help="a recording (docs/recording.md)")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings to change")
    parser.add_argument("--model", help="folder of the weights that the step begins with")
    parser.add_argument("--reference", help="folder of the reference policy (default: --model)")
    parser.add_argument("--level", help=_LEVEL)
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers (default: 0)")


def run(options: argparse.Namespace) -> int:
    """Print rows and metrics of a recording."""
    # Only now: verl takes half a minute to load. A file that cannot be read is found before.
    from agl_fast.recording import RecordingError, read_recording

    with wrong_input(options.parser, RecordingError):
        read_recording(options.file)

    from omegaconf import OmegaConf

    from agl_fast.commands.overrides import parse_overrides
    from agl_fast.tools.replay import replay

    with wrong_input(options.parser, ValueError, TypeError):
        overrides = OmegaConf.create(parse_overrides(options.settings))
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
