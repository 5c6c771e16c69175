"""Requests to the vLLM servers over pooled connections."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping

import aiohttp

from agl_fast.verl.proxy.fleet import Server
from agl_fast.verl.proxy.recorder import Recorder

CONNECT_SECONDS = 10.0
# vLLM's HTTP server closes a connection that was idle for 5 s: leave it before.
KEEP_ALIVE_SECONDS = 4.0
RETRIES = 2
RETRY_SECONDS = 0.05
_LARGE = 1 << 20


class UnreachableError(ConnectionError):
    """A server did not answer at all."""


class Connections:
    """A pool without a limit: the servers do the queueing. Lives in one event loop.

    Args:
        timeout_seconds: the longest a whole answer may take.
    """

    def __init__(self, recorder: Recorder, timeout_seconds: float) -> None:
        self._recorder = recorder
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=CONNECT_SECONDS),
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
        body: bytes | None,
    ) -> aiohttp.ClientResponse:
        """The response as soon as its headers are there.

        A connection that breaks before is tried again: most often it was idle, and closed by the
        server as the request went out.

        Raises:
            UnreachableError: no connection brought an answer.
            TimeoutError: the answer takes too long.
        """
        for retry in range(RETRIES + 1):
            try:
                response = await self._session.request(
                    method,
                    server.url + path,
                    headers=headers,
                    data=_in_pieces(body),
                    allow_redirects=False,
                )
            except aiohttp.ClientConnectionError as error:
                if retry == RETRIES:
                    raise UnreachableError(f"{server.url} cannot be reached: {error}") from error
                self._recorder.count("retries")
                await asyncio.sleep(RETRY_SECONDS * retry)
            except aiohttp.ClientError as error:
                raise UnreachableError(f"{server.url} does not speak HTTP: {error}") from error
            else:
                server.failures = 0
                return response
        raise AssertionError("the loop returns or raises")

    async def close(self) -> None:
        await self._session.close()


def _in_pieces(body: bytes | None) -> bytes | io.BytesIO | None:
    """A large body goes out piece by piece: other agents' requests go on meanwhile."""
    return io.BytesIO(body) if body is not None and len(body) > _LARGE else body
