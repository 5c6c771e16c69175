"""Token ids out of text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agl_fast import _core


def parse_token_ids(text: str | bytes) -> NDArray[np.int32]:
    """Read a JSON array of token ids, as it stands in JSON bodies and span attributes.

    Args:
        text: such as ``"[1, 2, 3]"``; JSON white space is allowed, nothing else.

    Returns:
        The ids, int32, of shape (N,).

    Raises:
        TypeError: ``text`` is neither str nor bytes.
        ValueError: it is not an array of integers from 0 to 2**31 - 1; the position is named.
    """
    return _core.parse_token_ids(text)
