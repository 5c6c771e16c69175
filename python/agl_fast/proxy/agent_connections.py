"""Connections of agents, as aiohttp serves them, within limits and with errors in JSON."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from agl_fast.proxy import replies
from agl_fast.proxy.limits import HttpLimits
from agl_fast.proxy.recorder import Recorder

# An agent's tools may take so long between two calls on one connection.
KEEP_ALIVE_SECONDS = 3600.0
# What is left of a refused body is read and thrown away for so long, so that the client reads why.
LINGERING_SECONDS = 2.0


class AgentConnection(web.RequestHandler):
    """One connection. ``begin_request`` and ``end_request`` frame every request on it."""

    def __init__(
        self, server: AgentServer, limits: HttpLimits, recorder: Recorder, **options: Any
    ) -> None:
        super().__init__(
            server,
            auto_decompress=False,
            keepalive_timeout=KEEP_ALIVE_SECONDS,
            lingering_time=LINGERING_SECONDS,
            max_line_size=limits.max_header_bytes,
            max_field_size=limits.max_header_bytes,
            **options,
        )
        self._server = server
        self._limits = limits
        self._recorder = recorder
        self._header_timer: asyncio.TimerHandle | None = None
        self._is_busy = False
        self._is_refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self._server.connections) > self._limits.max_connections:
            self._refuse(
                503,
                "server_error",
                "as many connections are open as agentlightning.proxy.max_connections="
                f"{self._limits.max_connections}",
            )
        else:
            self._expect_headers()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if not self._is_busy and self._header_timer is None and data:
            self._expect_headers()
        super().data_received(data)

    def connection_lost(self, error: BaseException | None) -> None:
        self._stop_timer()
        super().connection_lost(error)

    def begin_request(self) -> None:
        self._is_busy = True
        self._stop_timer()

    def end_request(self) -> None:
        self._is_busy = False

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What aiohttp answers by itself: requests that are no HTTP, and our own faults."""
        self._stop_timer()
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the answer has been sent")
        if status >= 500:
            self.log_exception("A request of %s failed in the proxy", request.remote, exc_info=exc)
            self._recorder.count("proxy_errors")
            reply = replies.error(status, "server_error", f"the proxy failed: {exc!r}")
        else:
            self._recorder.count("bad_requests")
            if isinstance(exc, LineTooLong):
                status = 431
                message = (
                    "the request line or a header has more bytes than agentlightning.proxy."
                    f"max_header_bytes={self._limits.max_header_bytes}"
                )
            reply = replies.error(status, "invalid_request_error", message or repr(exc))
        reply.force_close()
        return reply

    def _expect_headers(self) -> None:
        self._header_timer = asyncio.get_running_loop().call_later(
            self._limits.header_seconds,
            self._refuse,
            408,
            "timeout_error",
            "no request came within agentlightning.proxy.header_seconds="
            f"{self._limits.header_seconds:g} s",
        )

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _refuse(self, status: int, kind: str, message: str) -> None:
        """Answer outside of any request, and close the connection."""
        self._header_timer = None
        self._is_refused = True
        self._recorder.count("refused_connections")
        if self.transport is None:
            return
        self.transport.write(replies.raw_error(status, kind, message))
        # Closed at once, with bytes unread, the client would see a reset and no answer.
        self.transport.write_eof()
        asyncio.get_running_loop().call_later(LINGERING_SECONDS, self.force_close)


class AgentServer(web.Server):
    """Makes the connections."""

    def __init__(self, handler: Any, limits: HttpLimits, recorder: Recorder) -> None:
        super().__init__(handler, handler_cancellation=True)
        self._limits = limits
        self._recorder = recorder

    def __call__(self) -> AgentConnection:
        loop = asyncio.get_running_loop()
        return AgentConnection(self, self._limits, self._recorder, loop=loop, access_log=None)
