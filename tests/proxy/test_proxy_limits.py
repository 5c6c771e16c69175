"""What one client may take of the proxy, and the errors it gets, in JSON."""

from __future__ import annotations

import gzip
import json
import re
import socket
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from agl_fast.proxy.limits import HttpLimits
from support.fake_openai_server import FakeOpenAIServer
from support.raw_http import chat_body, chat_head, length, raw_request
from support.running_proxy import CHAT, RunningProxy, running_proxy, say, wait_until

KIB = 1 << 10


@contextmanager
def limited(fake: FakeOpenAIServer, **limits: Any) -> Iterator[RunningProxy]:
    with running_proxy(fake, http_limits=HttpLimits(**limits)) as running:
        yield running


def error_of(raw: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = raw.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower()
    error = json.loads(body)["error"]
    status = int(head.split()[1])
    assert error["code"] == status
    return status, error


def test_a_body_that_is_too_long(fake):
    """Refused by its length before it is read, by its bytes where no length is said."""
    body = json.dumps({"model": "policy", "messages": say("x" * 64 * KIB)}).encode()
    with limited(fake, max_body_bytes=64 * KIB) as proxy:
        url = proxy.base_url() + CHAT
        for content in (body, iter([body[:1000], body[1000:]])):
            answer = httpx.post(url, content=content, timeout=10)
            assert answer.status_code == 413
            assert "max_body_bytes=65536" in answer.json()["error"]["message"]
        head = chat_head(b"Content-Length: 999999999999", b"Expect: 100-continue")
        status, _ = error_of(raw_request(proxy, head))
        assert status == 413
        assert proxy.post().status_code == 200
        assert proxy.counts == {"bad_requests": 3, "recorded": 1}
    assert len(fake.requests) == 1


def spoilt(packed: bytes) -> bytes:
    middle = len(packed) // 2
    return packed[:middle] + bytes(255 - byte for byte in packed[middle : middle + 4]) + packed[-4:]


@pytest.mark.parametrize(
    ("encoding", "compress"),
    [
        ("gzip", gzip.compress),
        ("gzip", lambda body: gzip.compress(body[:9]) + gzip.compress(body[9:])),
        ("deflate", zlib.compress),
        ("deflate", lambda body: zlib.compress(body)[2:-4]),
    ],
)
def test_compressed_bodies(fake, encoding, compress):
    with limited(fake, max_body_bytes=64 * KIB) as proxy:
        url, headers = proxy.base_url() + CHAT, {"Content-Encoding": encoding}
        packed = compress(chat_body())
        assert httpx.post(url, content=packed, headers=headers).status_code == 200
        assert "Content-Encoding" not in fake.requests[0].headers
        for broken in (packed[:-5], b"", b"no " + packed, spoilt(packed)):
            answer = httpx.post(url, content=broken, headers=headers)
            assert answer.status_code == 400, broken
            assert answer.json()["error"]["type"] == "invalid_request_error"
        bomb = compress(b" " * (64 * KIB) + chat_body())
        assert len(bomb) < KIB
        answer = httpx.post(url, content=bomb, headers=headers)
        assert answer.status_code == 413
        assert proxy.post().status_code == 200
    assert len(fake.requests) == 2


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, gzip"])
def test_encodings_that_are_not_read(fake, encoding):
    with limited(fake) as proxy:
        answer = proxy.client.post(
            proxy.base_url() + CHAT, content=b"\x0b\x02", headers={"Content-Encoding": encoding}
        )
        assert answer.status_code == 415
        assert "gzip" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("head", "body", "status"),
    [
        (chat_head(b"Transfer-Encoding: chunked"), b"zz\r\nnonsense\r\n0\r\n\r\n", 400),
        (chat_head(b"Content-Length: many"), b"", 400),
        (chat_head(b"X: " + b"x" * 9 * KIB), b"", 431),
        (chat_head(path=b"/" + b"x" * 9 * KIB), b"", 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"", 400),
        (b"GET\r\n\r\n", b"", 400),
        (b"GET / HTTP/9.9\r\n\r\n", b"", 400),
        (chat_head(length(chat_body()), b"Bad Header: 1"), chat_body(), 400),
    ],
)
def test_requests_that_are_no_http(fake, head, body, status):
    with limited(fake, max_header_bytes=8 * KIB) as proxy:
        found, error = error_of(raw_request(proxy, head, body))
        assert found == status
        assert error["type"] == "invalid_request_error"
        assert proxy.counts == {"bad_requests": 1}
        assert proxy.post().status_code == 200


def test_json_that_is_too_deep(fake):
    with limited(fake) as proxy:
        answer = proxy.client.post(
            proxy.base_url() + CHAT,
            content=b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        )
        assert answer.status_code == 400
        assert "not a JSON object" in answer.json()["error"]["message"]


@pytest.mark.parametrize("sent", [b"", b"POST /rollout/r", chat_head(b"X: 1")[:-2]])
def test_connections_that_never_finish_their_headers_are_closed(fake, sent):
    with limited(fake, header_seconds=0.3) as proxy:
        status, error = error_of(raw_request(proxy, sent))
        assert (status, error["type"]) == (408, "timeout_error")
        assert "header_seconds=0.3" in error["message"]
        assert proxy.counts == {"refused_connections": 1}
        assert proxy.post().status_code == 200


def test_the_time_for_headers_is_not_that_of_a_connection(fake):
    """An agent thinks between two calls on one connection; a byte a time does not help."""
    request = chat_head(length(chat_body())).replace(b"Connection: close\r\n", b"") + chat_body()
    with limited(fake, header_seconds=1.0) as proxy:
        url = httpx.URL(proxy.url)
        with socket.create_connection((url.host, url.port), timeout=10) as connection:
            for _ in range(2):
                connection.sendall(request)
                answer = b""
                while b'"usage"' not in answer:
                    answer += connection.recv(1 << 16)
                assert answer.startswith(b"HTTP/1.1 200")
                time.sleep(1.5)
            begin = time.monotonic()
            answer = b""
            connection.settimeout(0.1)
            connection.sendall(b"GET / HTTP/1.1\r\nX: ")
            while not answer and time.monotonic() - begin < 10:
                try:
                    connection.sendall(b"P")
                    answer = connection.recv(1 << 16)
                except TimeoutError:
                    continue
            assert answer.startswith(b"HTTP/1.1 408")


def test_a_body_that_does_not_come(fake):
    with limited(fake, body_seconds=0.3) as proxy:
        status, error = error_of(raw_request(proxy, chat_head(b"Content-Length: 100"), b"{"))
        assert status == 408
        assert "body_seconds=0.3" in error["message"]


def test_too_many_connections(fake):
    with limited(fake, max_connections=3) as proxy:
        url = httpx.URL(proxy.url)
        address = (url.host, url.port)
        idle = [socket.create_connection(address, timeout=10) for _ in range(3)]
        try:
            status, error = error_of(raw_request(proxy, b""))
            assert status == 503
            assert "max_connections=3" in error["message"]
        finally:
            for connection in idle:
                connection.close()
        wait_until(
            lambda: raw_request(proxy, chat_head(length(chat_body())), chat_body())[9:12] == b"200"
        )


def test_requests_in_a_pipeline_are_answered_in_order(fake):
    request = chat_head(length(chat_body())) + chat_body()
    keep = request.replace(b"Connection: close\r\n", b"")
    with limited(fake) as proxy:
        bad = keep.replace(b"POST", b"GET", 1)
        answer = raw_request(proxy, keep + bad + keep + request)
        statuses = re.findall(rb"HTTP/1.1 (\d+)", answer)
        assert statuses == [b"200", b"404", b"200", b"200"]
        assert len(proxy.take()) == 3


def test_health_and_other_methods(fake):
    with limited(fake) as proxy:
        assert proxy.client.get(proxy.url + "/health").json() == {"status": "ok"}
        assert proxy.client.head(proxy.url + "/health").status_code == 200
        for method in ("HEAD", "OPTIONS", "PUT", "DELETE"):
            answer = proxy.client.request(method, proxy.base_url() + CHAT)
            assert answer.status_code == 404
        assert proxy.post().status_code == 200
    assert len(fake.requests) == 1


def test_a_fault_of_the_proxy_is_json(fake, caplog):
    with limited(fake) as proxy:
        proxy.server.next_sequence = None
        proxy.server.recorder.add = None
        answer = proxy.post()
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert proxy.counts["proxy_errors"] == 1
