"""Parse token ids from JSON strictly."""

from __future__ import annotations

MAX_TOKEN_ID = 2**31 - 1

_SPACE = " \t\n\r"
_DIGITS = "0123456789"


def parse_token_ids(text: str | bytes) -> list[int]:
    """Parse ``"[1, 2, 3]"``: a JSON array of integers from 0 to 2**31 - 1.

    Raises:
        ValueError: names the position of the first character that cannot stand there, or of a
            number that is too large.
    """
    # Latin-1 keeps one character per byte, so positions count bytes; no id needs more than ASCII.
    source = text.decode("latin-1") if isinstance(text, bytes) else text
    at = _expect("[", source, _skip_space(source, 0))
    at = _skip_space(source, at)
    ids: list[int] = []
    if source[at : at + 1] == "]":
        at += 1
    else:
        while True:
            value, at = _read_id(source, at)
            ids.append(value)
            at = _skip_space(source, at)
            if source[at : at + 1] == "]":
                at += 1
                break
            at = _skip_space(source, _expect(",", source, at))
    at = _skip_space(source, at)
    if at < len(source):
        raise ValueError(f"position {at}: nothing may follow the array, got {source[at]!r}")
    return ids


def _skip_space(source: str, at: int) -> int:
    while at < len(source) and source[at] in _SPACE:
        at += 1
    return at


def _expect(char: str, source: str, at: int) -> int:
    if source[at : at + 1] != char:
        raise ValueError(f"position {at}: expected {char!r}, got {_found(source, at)}")
    return at + 1


def _read_id(source: str, start: int) -> tuple[int, int]:
    end = start
    while end < len(source) and source[end] in _DIGITS:
        end += 1
    digits = source[start:end]
    if not digits:
        raise ValueError(f"position {start}: expected a token id, got {_found(source, start)}")
    if len(digits) > 1 and digits[0] == "0":
        raise ValueError(f"position {start}: a number has no leading zero")
    # Check the length first: int() refuses very long numbers with another message.
    if len(digits) > 10 or int(digits) > MAX_TOKEN_ID:
        raise ValueError(f"position {start}: token id {digits[:20]} is larger than {MAX_TOKEN_ID}")
    return int(digits), end


def _found(source: str, at: int) -> str:
    return repr(source[at]) if at < len(source) else "the end"
