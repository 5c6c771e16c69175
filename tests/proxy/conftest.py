"""A fake vLLM server and a proxy in front of it, for every test of the proxy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.fake_openai_server import FakeOpenAIServer
from support.running_proxy import RunningProxy, running_proxy


@pytest.fixture
def fake() -> Iterator[FakeOpenAIServer]:
    with FakeOpenAIServer() as server:
        yield server


@pytest.fixture
def proxy(fake: FakeOpenAIServer) -> Iterator[RunningProxy]:
    with running_proxy(fake) as running:
        yield running
