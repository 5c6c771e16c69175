"""Requests and answers written byte by byte, as no client or server would."""

from __future__ import annotations

import json
import socket
import threading

import httpx

from agl_fast.proxy.fleet import Fleet
from support.running_proxy import RunningProxy, say


def raw_request(proxy: RunningProxy, head: bytes, body: bytes = b"") -> bytes:
    """What a client gets that writes its request itself."""
    url = httpx.URL(proxy.url)
    with socket.create_connection((url.host, url.port), timeout=10) as connection:
        connection.sendall(head + body)
        answer = b""
        while chunk := connection.recv(1 << 16):
            answer += chunk
        return answer


def chat_head(*headers: bytes, path: bytes = b"/rollout/ro-1/attempt/at-1/v1/chat/completions"):
    lines = [b"POST " + path + b" HTTP/1.1", b"Host: x", b"Connection: close", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def chat_body() -> bytes:
    return json.dumps({"model": "policy", "messages": say("hi")}).encode()


def length(body: bytes) -> bytes:
    return b"Content-Length: " + str(len(body)).encode()


def fleet_of(address: str):
    entry = {"api_base": f"http://{address}/v1"}
    return Fleet([{"model_name": "policy", "litellm_params": entry}])


class serving:
    """A server that gives every request one answer."""

    def __init__(
        self, body: bytes, kind: bytes = b"application/json", status: bytes = b"200 OK"
    ) -> None:
        head = b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n"
        self._answer = head % (status, kind, len(body)) + b"Connection: close\r\n\r\n" + body

    def __enter__(self) -> str:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(self._answer)

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._thread.join(5)
