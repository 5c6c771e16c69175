"""Waits end when what they wait for has died, with the cause."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import httpx
import pytest

import support.verl_trainer_imports  # noqa: F401
from agl_fast.verl.supervision import watch
from agl_fast.verl.supervision.waits import Limit
from agl_fast.verl.supervision.watch import (
    ServersAlive,
    WorkersAlive,
    watched,
)


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(watch, "ANSWER_SECONDS", 1.0)


def fail() -> None:
    raise ConnectionError("the server is gone")


def test_a_failing_check_interrupts_the_wait_with_its_cause():
    start = time.monotonic()
    with (
        pytest.raises(RuntimeError, match="the update: the server is gone") as raised,
        watched("the update", 60, fail),
    ):
        time.sleep(60)
    assert time.monotonic() - start < 30
    assert isinstance(raised.value.__cause__, ConnectionError)


def test_time_that_is_up_is_named():
    with (
        pytest.raises(TimeoutError, match=r"the nap did not finish within 0\.2 s"),
        watched("the nap", 0.2, lambda: None),
    ):
        time.sleep(60)


def test_the_blocks_own_error_passes_and_no_alarm_is_left():
    with pytest.raises(KeyError), watched("nothing", 60, lambda: None):
        raise KeyError
    with watched("nothing", 60, fail):
        pass
    time.sleep(0.2)
    assert signal.getsignal(signal.SIGALRM) is not None


def test_on_another_thread_the_block_is_only_run():
    found: list[str] = []

    def run() -> None:
        with watched("elsewhere", 0.01, fail):
            time.sleep(0.2)
            found.append("ran")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == ["ran"]


@contextmanager
def health_server(status: int) -> Iterator[str]:
    """`host:port` of a server that answers every request with `status`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def actors_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_require_living_actor", lambda *_: None)


def test_a_server_that_answers_lives_and_a_silent_one_is_given_up(actors_live):
    with health_server(200) as address:
        patient, impatient = (
            ServersAlive([address], [object()], Limit(seconds, "a.key")) for seconds in (45.0, 0.0)
        )
        patient()
        impatient()
    for _ in range(watch.FAILURES_IN_A_ROW - 1):
        impatient()  # a few failures prove nothing
    for _ in range(watch.FAILURES_IN_A_ROW):
        patient()
    with pytest.raises(RuntimeError, match=rf"{address} has not answered for 0 s \(a\.key\)"):
        impatient()


def test_without_a_limit_the_default_of_the_configuration_counts(monkeypatch, actors_live):
    now = [0.0]
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Client:
        def get(self, url: str) -> httpx.Response:
            raise httpx.ConnectError("nobody listens")

    alive = ServersAlive(["10.0.0.1:80"], [None])
    monkeypatch.setattr(alive, "_client", Client())
    for now[0] in (0.0, 60.0, 120.0):
        alive()
    now[0] = 120.5
    key = r"agentlightning\.deadlines\.server_silent_seconds"
    with pytest.raises(RuntimeError, match=rf"has not answered for 120 s \({key}\)"):
        alive()


def test_a_server_whose_engine_is_dead_says_so(actors_live):
    with health_server(503) as address:
        alive = ServersAlive([address], [object()], Limit(45.0))
        for _ in range(watch.FAILURES_IN_A_ROW - 1):
            alive()
        with pytest.raises(RuntimeError, match=f"{address} is dead"):
            alive()


def test_failures_that_are_not_in_a_row_end_nothing(monkeypatch, actors_live):
    """64 servers, one of which misses every second question."""
    addresses = [f"10.0.0.{i}:80" for i in range(64)]
    alive = ServersAlive(addresses, [None] * 64, Limit(0.0))

    class Client:
        asked = 0

        def get(self, url: str) -> httpx.Response:
            if url == f"http://{addresses[-1]}/health":
                Client.asked += 1
                if Client.asked % 2:
                    raise httpx.ReadTimeout("busy for once")
            return httpx.Response(200, request=httpx.Request("GET", url))

    monkeypatch.setattr(alive, "_client", Client())
    for _ in range(12):
        alive()
    assert Client.asked == 12


def test_every_server_is_asked_at_the_same_time(monkeypatch, actors_live):
    """All 64 requests are under way before one is answered."""
    together = threading.Barrier(64)

    class Client:
        def get(self, url: str) -> httpx.Response:
            together.wait(20)
            return httpx.Response(200, request=httpx.Request("GET", url))

    alive = ServersAlive([f"10.0.0.{i}:80" for i in range(64)], [None] * 64, Limit(0.0))
    monkeypatch.setattr(alive, "_client", Client())
    alive()


def test_a_server_whose_actor_died_is_named_at_once(monkeypatch):
    def dead(what: str, handle: object) -> None:
        raise RuntimeError(f"{what} is dead: the actor died")

    monkeypatch.setattr(watch, "_require_living_actor", dead)
    with health_server(200) as good:
        with health_server(200) as gone:
            pass
        with pytest.raises(RuntimeError, match=f"{gone} is dead: the actor died"):
            ServersAlive([good, gone], [object(), object()], Limit(45.0))()


def test_workers_are_asked_at_the_same_time(monkeypatch):
    together = threading.Barrier(16)
    monkeypatch.setattr(watch, "_require_living_actor", lambda *_: together.wait(20))
    WorkersAlive([object()] * 16)()


def test_a_dead_worker_is_named_with_its_cause(monkeypatch):
    def ask(_: object, timeout: float) -> None:
        raise watch.ray.exceptions.RayActorError

    worker = SimpleNamespace(__ray_ready__=SimpleNamespace(remote=lambda: None))
    monkeypatch.setattr(watch.ray, "get", ask)
    with pytest.raises(RuntimeError, match="a training worker is dead: "):
        WorkersAlive([worker])()
