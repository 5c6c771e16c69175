"""Server-sent events out of bytes as they arrive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream.

    Attributes:
        raw: its bytes as they came, with the empty line that ends it.
        data: of its ``data`` lines; None where it has none (a comment, a ping).
    """

    raw: bytes
    data: bytes | None


class EventReader:
    """Splits a stream into its events, however its bytes are cut into chunks.

    Lines end with LF, CRLF or CR, as the HTML standard has it.
    """

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # pieces of a line that has not ended
        self._raw: list[bytes] = []  # lines of an event that has not ended
        self._data: list[bytes] = []
        self._begun = False

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """The events that the chunk completes."""
        # A CR at the end of a chunk may be half of a line's end.
        if chunk and self._rest and self._rest[-1].endswith(b"\r"):
            end = b"\n" if chunk.startswith(b"\n") else b""
            chunk = chunk[len(end) :]
            yield from self._end_line(end)
        lines = chunk.splitlines(keepends=True)
        rest = [lines.pop()] if lines and not lines[-1].endswith(b"\n") else []
        for line in lines:
            yield from self._end_line(line)
        self._rest += rest

    def _end_line(self, last_piece: bytes) -> Iterator[Event]:
        line = b"".join([*self._rest, last_piece])
        self._rest = []
        self._raw.append(line)
        text = line.rstrip(b"\r\n")
        if not self._begun:
            self._begun = True
            text = text.removeprefix(_BOM)
        if text.startswith(b"data:"):
            self._data.append(text[5:].removeprefix(b" "))
        elif not text:
            data = b"\n".join(self._data) if self._data else None
            yield Event(b"".join(self._raw), data)
            self._raw, self._data = [], []

    @property
    def rest(self) -> bytes:
        """What is left of a stream that ended within an event."""
        return b"".join([*self._raw, *self._rest])
