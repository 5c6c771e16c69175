"""What the proxy itself answers, and which headers it passes on."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from aiohttp import web
from multidict import CIMultiDict

# Of one connection, not of the message (RFC 9110), or written anew on the next.
_OF_CONNECTION = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "content-length",
}
_NOT_TO_SERVER = _OF_CONNECTION | {
    "accept-encoding",  # ids are read out of the answer
    "authorization",  # the proxy's own key
    "x-api-key",
    "content-encoding",
    "expect",
    "host",
    "x-agl-train",
    "x-agl-agent",
}


# OpenAI's clients obey it; without it they try again after 408, 409, 429 and every 5xx.
_NO_RETRY = {"x-should-retry": "false"}
_NOT_IMPLEMENTED = 501


def error(status: int, kind: str, message: str, *, retry: bool = False) -> web.Response:
    """An error as OpenAI's clients read it.

    Args:
        retry: the same request may succeed later: whether the client tries again is its choice.
    """
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return web.Response(
        status=status,
        body=json.dumps(body).encode(),
        content_type="application/json",
        headers={} if retry else _NO_RETRY,
    )


def error_event(kind: str, message: str) -> bytes:
    """An error in a stream, in place of the rest of the answer."""
    body = {"error": {"message": message, "type": kind, "param": None, "code": 502}}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def raw_error(status: int, kind: str, message: str) -> bytes:
    """The same as bytes of a whole answer, after which the connection closes."""
    reply = error(status, kind, message)
    assert isinstance(reply.body, bytes)
    head = (
        f"HTTP/1.1 {status} {reply.reason}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(reply.body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + reply.body


def headers_for_server(
    headers: Mapping[str, str], api_key: str | None, removed: Collection[str]
) -> CIMultiDict[str]:
    """
    Args:
        removed: names that the server must not get, in lower case.
    """
    passed = CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if name.lower() not in _NOT_TO_SERVER and name.lower() not in removed
    )
    if api_key is not None:
        passed["Authorization"] = f"Bearer {api_key}"
    return passed


def headers_for_agent(headers: Mapping[str, str], status: int) -> CIMultiDict[str]:
    passed = CIMultiDict(
        (name, value) for name, value in headers.items() if name.lower() not in _OF_CONNECTION
    )
    if status == _NOT_IMPLEMENTED:
        passed.extend(_NO_RETRY)
    return passed
