"""Waits end when what they wait for has died, with the cause."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

import verl_trainer_imports  # noqa: F401
from agl_fast.verl.deadline import Limit
from agl_fast.verl.trainer import watch
from agl_fast.verl.trainer.watch import (
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
    patient()  # one silence proves nothing
    with pytest.raises(RuntimeError, match=rf"{address} has not answered for 0 s \(a\.key\)"):
        impatient()


def test_a_server_whose_engine_is_dead_says_so(actors_live):
    with health_server(503) as address, pytest.raises(RuntimeError, match=f"{address} is dead"):
        ServersAlive([address], [object()], Limit(45.0))()


def test_a_dead_worker_is_named_with_its_cause(monkeypatch):
    def ask(_: object, timeout: float) -> None:
        raise watch.ray.exceptions.RayActorError

    worker = SimpleNamespace(__ray_ready__=SimpleNamespace(remote=lambda: None))
    monkeypatch.setattr(watch.ray, "get", ask)
    with pytest.raises(RuntimeError, match="a training worker is dead: "):
        WorkersAlive([worker])()
