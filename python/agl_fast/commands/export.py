"""`python -m agl_fast export CKPT OUT`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from agl_fast.verl.export import export

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(arguments: Sequence[str]) -> int:
    """Write the directory and say so."""
    parser = argparse.ArgumentParser(
        prog="python -m agl_fast export",
        description="Write the actor of a checkpoint as a Hugging Face directory, which vLLM "
        "serves: vllm serve OUT",
    )
    parser.add_argument(
        "checkpoint", metavar="CKPT", help="global_step_N, or a run's folder: its latest step"
    )
    parser.add_argument("out", metavar="OUT", help="a new or empty folder")
    parser.add_argument("--dtype", choices=list(_DTYPES), help="default: as trained")
    parser.add_argument("--trust-remote-code", action="store_true")
    options = parser.parse_args(arguments)
    folder = export(
        options.checkpoint,
        options.out,
        dtype=_DTYPES.get(options.dtype),
        trust_remote_code=options.trust_remote_code,
    )
    print(f"{folder} -> {options.out}")
    return 0
