"""`python -m agl_fast export CKPT OUT`."""

from __future__ import annotations

import argparse

from agl_fast.commands.wrong_input import wrong_input

_DTYPES = ("float32", "bfloat16", "float16")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write the actor of a checkpoint as a Hugging Face directory, which vLLM serves: "
        "vllm serve OUT"
    )
    parser.add_argument(
        "checkpoint", metavar="CKPT", help="global_step_N, or a run's folder: its latest step"
    )
    parser.add_argument("out", metavar="OUT", help="a new or empty folder")
    parser.add_argument("--dtype", choices=_DTYPES, help="default: as trained")
    parser.add_argument("--trust-remote-code", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Write the directory and print its path."""
    # Only now: --help needs no torch.
    import torch

    from agl_fast.tools.export import export

    with wrong_input(options.parser, ValueError):
        folder = export(
            options.checkpoint,
            options.out,
            dtype=None if options.dtype is None else getattr(torch, options.dtype),
            trust_remote_code=options.trust_remote_code,
        )
    print(f"{folder} -> {options.out}")
    return 0
