"""`python -m agl_fast analyze FILE`."""

from __future__ import annotations

import argparse
import json
import logging
from typing import Any

from agl_fast.commands.wrong_input import wrong_input
from agl_fast.tools.analyze.costs import MICRO_BATCH_TOKENS


def run(options: argparse.Namespace) -> int:
    """Print what each level would cost and lose."""
    # torch (2.13) warns of a function that its own nested tensors call.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    if bool(options.files) == (options.store is not None):
        options.parser.error("expected FILE, or --store")
    if options.model is None and options.tflops is not None:
        options.parser.error("--tflops needs --model")
    limits = {
        name: getattr(options, name)
        for name in ("max_prompt_length", "max_response_length", "tree_max_tokens")
    }
    # Only now: --help needs no torch.
    from agl_fast.tools.analyze import Hardware, read_model_shape, read_traces

    with wrong_input(options.parser, ValueError, TypeError):
        hardware = Hardware(micro_batch_tokens=options.micro_batch_tokens, tflops=options.tflops)
        model = None if options.model is None else read_model_shape(options.model)
        tokenizer = None if options.tokenizer is None else _tokenizer(options.tokenizer)
        if options.store is None:
            traces = read_traces(options.files, limits)
        else:
            # Files need no Agent-lightning.
            from agl_fast.tools.analyze.store import read_store

            traces = read_store(options.store, limits)
        # A file that cannot be read is found before torch is loaded.
        from agl_fast.tools.analyze import analyze, as_json, as_text

        found = analyze(traces, model=model, hardware=hardware, tokenizer=tokenizer)
    print(json.dumps(as_json(found), indent=1) if options.json else as_text(found))
    return 0


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Estimate costs and losses of each level from the calls that your agents have made: rows, "
        "tokens, what breaks prefixes, and with --model operations and memory."
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="recordings (docs/recording.md)")
    parser.add_argument("--store", metavar="URL", help="read Agent-lightning's store instead")
    of_header = "default: the recording's, else none"
    parser.add_argument("--max-prompt-length", type=int, metavar="P", help=of_header)
    parser.add_argument("--max-response-length", type=int, metavar="R", help=of_header)
    parser.add_argument("--tree-max-tokens", type=int, metavar="N", help=of_header)
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="name the cause of broken prefixes from decoded text"
    )
    parser.add_argument(
        "--model", metavar="PATH", help="config.json or its folder: estimate operations and memory"
    )
    parser.add_argument(
        "--tflops",
        type=float,
        metavar="X",
        help="training throughput of all GPUs: estimate seconds",
    )
    parser.add_argument(
        "--micro-batch-tokens",
        type=int,
        default=MICRO_BATCH_TOKENS,
        metavar="N",
        help=f"micro-batch size, for the memory (default: {MICRO_BATCH_TOKENS})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)
