"""How much of the proxy one client may take, and the errors that say so."""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from agl_fast.proxy.large_json import in_thread_if_large

_ENCODINGS = ("gzip", "x-gzip", "deflate", "identity", "")
_GZIP_OR_ZLIB, _RAW_DEFLATE = zlib.MAX_WBITS | 32, -zlib.MAX_WBITS
_CHUNK = 1 << 20


@dataclass(frozen=True)
class HttpLimits:
    """Keys of ``agentlightning.proxy``.

    Attributes:
        max_body_bytes: of a request, before and after it is decompressed.
        max_header_bytes: of the request line, and of one header.
        header_seconds: from a connection's first byte, or from its beginning, until a request's
            headers are complete.
        body_seconds: for all of a request's body.
        max_connections: open at the same time; a further one is answered with 503.
    """

    max_body_bytes: int = 128 << 20
    max_header_bytes: int = 64 << 10
    header_seconds: float = 60.0
    body_seconds: float = 300.0
    max_connections: int = 16384


class RefusedBodyError(ValueError):
    """A request's body is not read, or cannot be; the message is for the agent.

    Attributes:
        status: of the answer.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def read_limited(request: web.BaseRequest, limits: HttpLimits) -> bytes:
    """The body, decompressed.

    Raises:
        RefusedBodyError: it is too large, too slow, or not encoded as its headers say.
    """
    _require_size(request.content_length or 0, limits)
    encodings = request.headers.get("Content-Encoding", "").lower().replace(" ", "").split(",")
    unknown = [each for each in encodings if each not in _ENCODINGS]
    if unknown or len(encodings) > 1:
        raise RefusedBodyError(
            415, f"Content-Encoding {','.join(encodings)!r}: send gzip, deflate or none"
        )
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    try:
        body = await asyncio.wait_for(_read(request, limits), limits.body_seconds)
    except asyncio.TimeoutError:
        raise RefusedBodyError(
            408,
            f"the body did not arrive within agentlightning.proxy.body_seconds="
            f"{limits.body_seconds:g} s",
        ) from None
    except (aiohttp.ClientPayloadError, web.RequestPayloadError, HttpProcessingError) as error:
        raise RefusedBodyError(400, f"the body cannot be read: {error}") from error
    if encodings[0] in ("", "identity"):
        return body
    # zlib works without the interpreter lock: other agents' requests go on.
    return await asyncio.to_thread(_decompressed, body, encodings[0], limits)


async def _read(request: web.BaseRequest, limits: HttpLimits) -> bytes:
    chunks, n_bytes = [], 0
    while chunk := await request.content.readany():
        chunks.append(chunk)
        n_bytes += len(chunk)
        _require_size(n_bytes, limits)
    # Joined without the interpreter lock.
    return await in_thread_if_large(n_bytes, b"".join, chunks)


def _require_size(n_bytes: int, limits: HttpLimits) -> None:
    if n_bytes > limits.max_body_bytes:
        raise RefusedBodyError(
            413,
            "the body has more bytes than agentlightning.proxy.max_body_bytes="
            f"{limits.max_body_bytes}",
        )


def _decompressed(body: bytes, encoding: str, limits: HttpLimits) -> bytes:
    # Some clients send deflate without zlib's header.
    is_raw = encoding == "deflate" and body[:1] and body[0] & 0x0F != 8
    window = _RAW_DEFLATE if is_raw else _GZIP_OR_ZLIB
    pieces, n_bytes = [], 0
    part = None
    try:
        for begin in range(0, len(body), _CHUNK):
            rest = body[begin : begin + _CHUNK]
            is_full = False
            while rest or is_full:
                if part is None or part.eof:  # gzip may have several members
                    part = zlib.decompressobj(window)
                piece = part.decompress(rest, _CHUNK)
                pieces.append(piece)
                n_bytes += len(piece)
                _require_size(n_bytes, limits)
                rest = part.unused_data if part.eof else part.unconsumed_tail
                is_full = len(piece) == _CHUNK and not part.eof
        if part is None or not part.eof:
            raise zlib.error("it ends too early")
    except zlib.error as error:
        raise RefusedBodyError(400, f"the body is no {encoding}: {error}") from None
    return b"".join(pieces)
