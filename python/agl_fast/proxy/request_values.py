"""Values of a request as vLLM reads them: its request classes turn strings into numbers."""

from __future__ import annotations

from typing import Any

from agl_fast.proxy.large_json import LargeValue


def is_on(value: Any) -> bool:
    """Whether vLLM reads a JSON value as true: also numbers other than 0, "true", "1", "yes"."""
    if isinstance(value, str):
        return value.strip().lower() in ("1", "on", "t", "true", "y", "yes")
    if isinstance(value, LargeValue):
        return not value.is_string
    return bool(value)


def unquoted(value: Any) -> Any:
    """A string that vLLM reads as a number as that number; other values as they are."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def number(value: Any) -> int | None:
    """A JSON value as vLLM reads an integer: also 2.0, "2" and "2.0". None: it is none."""
    if isinstance(value, str):
        whole, point, zeros = value.strip().partition(".")
        if point and (not zeros or zeros.strip("0")):
            return None
        try:
            return int(whole)
        except ValueError:
            return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return int(value) if isinstance(value, int) else None
