"""Errors in a user's file or argument, in one line instead of a traceback."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def wrong_input(parser: argparse.ArgumentParser, *kinds: type[Exception]) -> Iterator[None]:
    """Report errors of the block as errors of the command line.

    Args:
        parser: the command's.
        kinds: errors that the input causes, as the functions in the block document them; OSError is
            always one.

    Raises:
        SystemExit: the block raised one of them; the status is 2.
    """
    expected: tuple[type[Exception], ...] = (OSError, *kinds)
    try:
        yield
    except expected as error:
        parser.error(one_line(error))


def one_line(error: Exception) -> str:
    """The message, without the number that the system has for it."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__
