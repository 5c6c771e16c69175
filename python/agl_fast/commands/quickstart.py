"""`python -m agl_fast quickstart`."""

from __future__ import annotations

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Nothing: the quickstart, also a program of its own, parses its arguments itself."""


def run(options: argparse.Namespace) -> int:
    """Train a tiny model on this machine."""
    from agl_fast.quickstart.__main__ import main

    return main(options.arguments)
