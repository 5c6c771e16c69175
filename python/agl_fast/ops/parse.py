"""Parse token ids."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agl_fast import _core


def parse_token_ids(text: str | bytes) -> NDArray[np.int32]:
    """Parse a JSON array of token ids, from a JSON body or a span attribute.

    Args:
        text: such as ``"[1, 2, 3]"``; JSON white space is allowed, nothing else.

    Returns:
        The ids, int32, of shape (N,).

    Raises:
        TypeError: ``text`` is neither str nor bytes.
        ValueError: the text is not an array of integers from 0 to 2**31 - 1; the message names the
            position.
    """
    return _core.parse_token_ids(text)
