"""What a user's file or argument is wrong with, in one line instead of a traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Exit status of argparse as well.
STATUS = 2


@contextmanager
def wrong_input(command: str, *kinds: type[Exception]) -> Iterator[None]:
    """End the process with status 2 and one line on stderr.

    Args:
        command: for the line.
        kinds: errors that are the input's, as the functions in the block document them; OSError
            always is.

    Raises:
        SystemExit: the block raised one of them.
    """
    expected: tuple[type[Exception], ...] = (OSError, *kinds)
    try:
        yield
    except expected as error:
        print(f"agl_fast {command}: {one_line(error)}", file=sys.stderr)
        raise SystemExit(STATUS) from error


def one_line(error: Exception) -> str:
    """The message, without the number that the system has for it."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__
