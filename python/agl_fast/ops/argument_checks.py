"""Check arguments."""

from __future__ import annotations

import operator

INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def integer(name: str, value: object, low: int, high: int) -> int:
    """Convert a value to int.

    Raises:
        TypeError: the value is not an integer (a bool is not).
        ValueError: the value is outside ``low`` … ``high``. Both name the argument and the value.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, got {value!r}")
    number = operator.index(value)
    if number < low:
        raise ValueError(f"{name} must be at least {low}, got {number}")
    if number > high:
        raise ValueError(f"{name} must be at most {high}, got {number}")
    return number
