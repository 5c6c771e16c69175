"""The proxy's server without Agent-lightning, and how tests talk to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx

from agl_fast.proxy.announced import AnnouncedRollout
from agl_fast.proxy.fleet import Fleet
from agl_fast.proxy.recorder import RecordedCall
from agl_fast.proxy.sampling import Phase, PhaseName, SamplingPolicy
from agl_fast.proxy.server import ProxyServer
from agl_fast.proxy.serving import ServingThread
from agl_fast.verl.supervision.waits import Limit
from support.fake_openai_server import FakeOpenAIServer

POLICY = SamplingPolicy(temperature=1.0, top_p=0.9, top_k=-1)
CHAT = "/chat/completions"


class RunningProxy:
    def __init__(self, server: ProxyServer, url: str, client: httpx.Client) -> None:
        self.server = server
        self.url = url
        self.client = client

    @property
    def counts(self) -> dict[str, int]:
        return self.server.recorder.counts

    def train(self, **changes: Any) -> None:
        self.serve_all("train", replace(POLICY, **changes))

    def serve_all(
        self, phase: PhaseName, sampling: SamplingPolicy | None, version: int | None = 3
    ) -> None:
        """Every rollout belongs to the phase; none has to be announced."""
        self.server.policy_version = version
        self.server.announced.others = AnnouncedRollout(Phase(phase, sampling), version)

    def serve_from(self, *fakes: FakeOpenAIServer) -> None:
        self.server.fleet = Fleet([fake.model_entry() for fake in fakes])

    def base_url(self, rollout: str | None = "ro-1", attempt: str = "at-1") -> str:
        middle = f"/rollout/{rollout}/attempt/{attempt}" if rollout else ""
        return f"{self.url}{middle}/v1"

    def post(
        self,
        path: str = CHAT,
        *,
        rollout: str | None = "ro-1",
        attempt: str = "at-1",
        headers: dict[str, str] | None = None,
        **body: Any,
    ) -> httpx.Response:
        prompt = {"prompt": "hi"} if path == "/completions" else {"messages": say("hi")}
        url = self.base_url(rollout, attempt) + path
        return self.client.post(url, json={"model": "policy", **prompt, **body}, headers=headers)

    def take(self, rollout: str = "ro-1", attempt: str = "at-1") -> list[RecordedCall]:
        return self.server.recorder.take(rollout, attempt)


@contextmanager
def running_proxy(
    *fakes: FakeOpenAIServer,
    api_key: str | None = None,
    timeout_seconds: float = 10.0,
    **settings: Any,
) -> Iterator[RunningProxy]:
    server = ProxyServer(api_key=api_key, timeout_seconds=timeout_seconds, **settings)
    thread = ServingThread(server)
    url = f"http://127.0.0.1:{thread.start('127.0.0.1', None, Limit(60.0))}"
    try:
        with httpx.Client(timeout=10.0) as client:
            running = RunningProxy(server, url, client)
            running.serve_from(*fakes)
            yield running
    finally:
        thread.stop(Limit(10.0))


def say(*texts: str) -> list[dict[str, str]]:
    """A conversation of a user and the assistant in turns."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)
