"""Text for terminals: escaped characters and aligned tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# What a terminal acts on, or what shows text in another order than it has: control characters of
# ASCII and Latin-1 (without line breaks and tabs), line and paragraph separators, directional
# characters, lone surrogates.
_UNSAFE = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
    r"\ufff9-\ufffb\ud800-\udfff"
)
_IN_BLOCK = re.compile(f"[{_UNSAFE}]")
_IN_LINE = re.compile(f"[{_UNSAFE}\\n\\t]")


def escaped(text: str, also: str = "") -> str:
    """The text with its unsafe characters as Python writes them (``\\x1b``, ``\\u2028``).

    Args:
        also: further characters to escape, such as marks of the printed page.
    """
    text = _IN_BLOCK.sub(_escape, text)
    return re.sub(f"[{re.escape(also)}]", _escape, text) if also else text


def escaped_line(text: str) -> str:
    """The same, with line breaks and tabs escaped as well: it cannot begin a line of its own."""
    return _IN_LINE.sub(_escape, text)


def shown(value: object, longest: int = 80) -> str:
    """A value as Python writes it, on one line and cut: for text that names what somebody sent."""
    text = escaped_line(repr(value))
    return text if len(text) <= longest else f"{text[:longest]}…"


def table(lines: Iterable[Sequence[str]]) -> str:
    """Align cells in columns: the first column to the left, the others to the right."""
    cells = list(lines)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]).rstrip()
        for first, *rest in cells
    )


def _escape(found: re.Match[str]) -> str:
    character = found.group()
    short = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(character)
    code = ord(character)
    return short or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")
