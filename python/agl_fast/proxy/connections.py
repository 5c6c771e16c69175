"""Requests to the servers over pooled connections."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import aiohttp
from aiohttp import payload

from agl_fast.proxy.fleet import Server
from agl_fast.proxy.recorder import Recorder

RETRIES = 2
RETRY_SECONDS = 0.05
_PIECE_BYTES = 256 << 10
# Refused, or not accepted in time: another try at once would end the same way.
_NO_CONNECTION = (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError)


class UnreachableError(ConnectionError):
    """A server did not answer at all.

    Attributes:
        breaks_connection: the request reached it, and the connection broke then.
    """

    def __init__(self, message: str, *, breaks_connection: bool = False) -> None:
        super().__init__(message)
        self.breaks_connection = breaks_connection


class Connections:
    """A pool without a limit: the servers do the queueing. Lives in one event loop.

    Args:
        connect_seconds: a server that does not accept a connection for so long cannot be reached.
        keep_alive_seconds: connections that were idle for so long are not used again.

    Attributes:
        session: for requests of the proxy's own.
    """

    def __init__(
        self, recorder: Recorder, connect_seconds: float, keep_alive_seconds: float
    ) -> None:
        self._recorder = recorder
        self._connect_seconds = connect_seconds
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=keep_alive_seconds),
            cookie_jar=aiohttp.DummyCookieJar(),
            # The agent's headers go out, and nothing in their place where it sends none.
            skip_auto_headers=["Accept", "Accept-Encoding", "User-Agent"],
            auto_decompress=False,
        )

    async def request(
        self,
        server: Server,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str],
        body: Sequence[bytes | memoryview] | None,
        seconds: float,
    ) -> aiohttp.ClientResponse:
        """The response as soon as its headers are there.

        A connection that breaks before is tried again: most often it was idle, and closed by the
        server as the request went out.

        Args:
            body: in pieces.
            seconds: the longest the whole answer may take.

        Raises:
            UnreachableError: no connection brought an answer.
            TimeoutError: the answer takes too long.
        """
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=self._connect_seconds)
        has_broken = False
        for retry in range(RETRIES + 1):
            try:
                response = await self.session.request(
                    method,
                    server.url + path,
                    headers=headers,
                    data=_payload_of(body),
                    allow_redirects=False,
                    timeout=timeout,
                )
            except aiohttp.ClientConnectionError as error:
                cannot_connect = isinstance(error, _NO_CONNECTION)
                has_broken = has_broken or not cannot_connect
                if retry == RETRIES or cannot_connect:
                    raise UnreachableError(
                        f"{server.url} cannot be reached: {error}",
                        breaks_connection=has_broken,
                    ) from error
                self._recorder.count("retries")
                await asyncio.sleep(RETRY_SECONDS * retry)
            except aiohttp.ClientError as error:
                raise UnreachableError(f"{server.url} does not speak HTTP: {error}") from error
            else:
                return response
        raise AssertionError("the loop returns or raises")

    async def close(self) -> None:
        await self.session.close()


def _payload_of(body: Sequence[bytes | memoryview] | None) -> bytes | _Pieces | None:
    if body is None:
        return None
    is_short = len(body) == 1 and len(body[0]) <= _PIECE_BYTES
    return bytes(body[0]) if is_short else _Pieces(body)


class _Pieces(payload.Payload):
    """A body that goes out piece by piece: other agents' requests go on meanwhile."""

    _autoclose = True  # nothing to close

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        super().__init__(pieces)
        self._size = sum(map(len, pieces))

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return b"".join(self._value).decode(encoding, errors)

    async def write(self, writer: Any) -> None:
        for piece in self._short_pieces():
            await writer.write(piece)

    def _short_pieces(self) -> Iterator[memoryview]:
        for piece in self._value:
            for begin in range(0, len(piece), _PIECE_BYTES):
                yield memoryview(piece)[begin : begin + _PIECE_BYTES]
