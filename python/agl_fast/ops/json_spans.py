"""Where the parts of a JSON text stand, found while other threads run."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agl_fast import _core


def json_members(
    text: bytes, begin: int = 0, end: int | None = None, *, constants: bool = True
) -> NDArray[np.int64]:
    """Find the members of a JSON object, and check all of it.

    The interpreter lock is not held. The text is read where ``json.loads`` reads it as UTF-8, but
    for values that are nested more than 800 deep.

    Args:
        text: UTF-8.
        begin, end: bounds of the object within ``text``, white space around it allowed.
        constants: NaN, Infinity and -Infinity are allowed, as ``json.loads`` allows them.

    Returns:
        int64, (N, 4): for each member begin and end of its name, quotes included, and begin and
        end of its value, as offsets into ``text``. Of members with one name the last counts.

    Raises:
        ValueError: it is not a JSON object; the position is named.
    """
    return _core.json_members(text, begin, len(text) if end is None else end, constants=constants)


def json_runs(
    text: bytes, begin: int, end: int, run_bytes: int, *, constants: bool = True
) -> tuple[int, NDArray[np.int64]]:
    """Cut a JSON array into slices of whole elements, as ``json_members`` reads it.

    Args:
        text: UTF-8.
        begin, end: bounds of the array within ``text``, white space around it allowed.
        run_bytes: the longest slice of several elements; a longer element has one of its own.

    Returns:
        How many elements there are, and int64, (R, 2): begin and end of each slice, as offsets into
        ``text``. Elements of a slice have their commas between them.

    Raises:
        ValueError: it is not a JSON array; the position is named.
    """
    return _core.json_runs(text, begin, end, run_bytes, constants=constants)
