"""JSON texts that are too large to be decoded at once while other requests wait.

``json.loads`` and ``json.dumps`` hold the interpreter lock: a text of 100 MB stops everything else
for more than a second. Here values of more than ``LARGE_BYTES`` stay the text that they came as.
Whoever looks into one gets it part by part, and the lock is free in between.
"""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from secrets import token_hex
from typing import Any, TypeVar

from agl_fast.ops.json_spans import json_members, json_runs

T = TypeVar("T")

# A value of so many bytes is decoded within half a millisecond.
LARGE_BYTES = 64 << 10
# What takes longer than a change of threads goes to a thread of its own.
_THREAD_BYTES = 1 << 20
_TRANSCODED_BYTES = 1 << 20


class LargeValue:
    """A value that is still its text.

    Args:
        text: UTF-8, checked already.
        begin, end: bounds of the value within the text.
        constants: as for ``json_members``.
    """

    __slots__ = ("_begin", "_constants", "_end", "_text")

    def __init__(self, text: bytes, begin: int, end: int, *, constants: bool = True) -> None:
        self._text = text
        self._begin = begin
        self._end = end
        self._constants = constants

    def __repr__(self) -> str:
        return f"<{self._end - self._begin} bytes of JSON>"

    @property
    def text(self) -> memoryview:
        return memoryview(self._text)[self._begin : self._end]

    def as_array(self) -> bytes:
        """An array with the value, or with the values if there are commas between several."""
        return b"".join((b"[", self.text, b"]"))

    @property
    def is_object(self) -> bool:
        return self._begins_with(b"{")

    @property
    def is_array(self) -> bool:
        return self._begins_with(b"[")

    @property
    def is_string(self) -> bool:
        return self._begins_with(b'"')

    def member_texts(self) -> dict[str, LargeValue]:
        """The members of an object, none of them decoded.

        Raises:
            ValueError: it is no object.
        """
        spans = json_members(self._text, self._begin, self._end, constants=self._constants)
        return {
            json.loads(self._text[name_begin:name_end]): self._part(begin, end)
            for name_begin, name_end, begin, end in spans.tolist()
        }

    def members(self) -> dict[str, Any]:
        """The members of an object, those decoded that are not large.

        Raises:
            ValueError: it is no object.
        """
        return {name: value.unless_large() for name, value in self.member_texts().items()}

    def count(self) -> int:
        """The number of an array's elements."""
        return json_runs(self._text, self._begin, self._end, LARGE_BYTES)[0]

    def runs(self) -> Iterator[bytes | LargeValue]:
        """An array in pieces: shorter arrays as JSON, and elements that are large."""
        _, spans = json_runs(
            self._text, self._begin, self._end, LARGE_BYTES, constants=self._constants
        )
        for begin, end in spans.tolist():
            part = self._part(begin, end)
            yield part if part.is_large else part.as_array()

    def elements(self) -> Iterator[Any]:
        """The elements of an array, those decoded that are not large."""
        for run in self.runs():
            if isinstance(run, LargeValue):
                yield run
            else:
                yield from json.loads(run)

    @property
    def is_large(self) -> bool:
        return self._end - self._begin > LARGE_BYTES

    def unless_large(self) -> Any:
        """The value, or itself where it is large."""
        return self if self.is_large else json.loads(bytes(self.text))

    def decoded(self) -> Any:
        """All of the value."""
        if self.is_object:
            return {name: decoded(value) for name, value in self.members().items()}
        if self.is_array:
            return [decoded(each) for each in self.elements()]
        return json.loads(bytes(self.text))

    def _part(self, begin: int, end: int) -> LargeValue:
        return LargeValue(self._text, begin, end, constants=self._constants)

    def _begins_with(self, character: bytes) -> bool:
        return self._text[self._begin : self._begin + 1] == character


def read_json(text: bytes) -> Any:
    """A JSON value as ``json.loads`` reads it; a large one is left as text.

    Raises:
        ValueError: it is no JSON, or a large value that is no object.
        RecursionError: it is nested too deeply.
    """
    return read_object(text) if len(text) > LARGE_BYTES else json.loads(text)


def read_object(text: bytes) -> dict[str, Any]:
    """A JSON object as ``json.loads`` reads it, with its large values left as text.

    Raises:
        ValueError: it is no JSON, or no object.
        RecursionError: it is nested too deeply.
    """
    if len(text) > LARGE_BYTES:
        text = _as_utf8(text)
        return LargeValue(text, 0, len(text)).members()
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"it is a value of type {type(value).__name__}")
    return value


def _as_utf8(text: bytes) -> bytes:
    """Transcoded piece by piece where it is in another encoding that JSON allows."""
    encoding = json.detect_encoding(text)
    if encoding == "utf-8":
        return text
    decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")
    pieces = [
        decoder.decode(text[begin : begin + _TRANSCODED_BYTES]).encode("utf-8", "surrogatepass")
        for begin in range(0, len(text), _TRANSCODED_BYTES)
    ]
    pieces.append(decoder.decode(b"", True).encode("utf-8", "surrogatepass"))
    return b"".join(pieces)


def elements_of(value: Any) -> Iterable[Any]:
    """Of a list, decoded or not; nothing of other values."""
    if isinstance(value, LargeValue):
        return value.elements() if value.is_array else ()
    return value if isinstance(value, list) else ()


def members_of(value: Any) -> Mapping[str, Any] | None:
    """Of an object, decoded or not; None: it is none."""
    if isinstance(value, LargeValue):
        return value.members() if value.is_object else None
    return value if isinstance(value, Mapping) else None


def decoded(value: Any) -> Any:
    return value.decoded() if isinstance(value, LargeValue) else value


def encoded(value: Mapping[str, Any]) -> list[bytes | memoryview]:
    """JSON as pieces of ASCII, and of what large values came as."""
    large: list[LargeValue] = []
    mark = token_hex(16)

    def stand_in(each: Any) -> str:
        if not isinstance(each, LargeValue):
            raise TypeError(f"{type(each).__name__} is no JSON")
        large.append(each)
        return mark

    # ASCII, as lone surrogates cannot be encoded otherwise.
    text = json.dumps(value, separators=(",", ":"), default=stand_in).encode()
    if not large:
        return [text]
    first, *others = text.split(f'"{mark}"'.encode())
    pieces: list[bytes | memoryview] = [first]
    for each, behind in zip(large, others, strict=True):
        pieces += [each.text, behind]
    return pieces


async def in_thread_if_large(n_bytes: int, function: Callable[..., T], *arguments: Any) -> T:
    """The function's result. Once begun, it is waited for, also where this is cancelled.

    Args:
        n_bytes: how much it reads.
    """
    if n_bytes <= _THREAD_BYTES:
        return function(*arguments)
    task = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # nobody else asks for it
        raise
