"""A run that succeeded ends without a traceback, whatever its processes still do."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("verl") is None:
    pytest.skip("needs the extra [cpu]", allow_module_level=True)

from support.daemon_runs import agentlightning, new_store
from support.fake_openai_server import Answer, FakeOpenAIServer
from support.process_runs import Options, Program, drive, free_port
from support.store_server import served

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # of Agent-lightning and what it imports
]
NOISE = ("Traceback", "Unclosed", "unclosed", "ERROR", "Cannot connect", "resource_tracker")


@pytest.fixture
def fake() -> Iterator[FakeOpenAIServer]:
    with FakeOpenAIServer() as fake:
        fake.respond = lambda _: Answer()
        yield fake


def test_runners_leave_before_the_store_does(tmp_path: Path, fake: FakeOpenAIServer) -> None:
    """Each asks it for work ten times a second, and beats three times."""
    options = Options("own", tmp_path, free_port(), fake.address, n_runners=6)
    program = Program(tmp_path, "run", drive, options)
    try:
        assert program.ended() == 0, program.output
        assert "the end" in program.output
        noisy = [line for line in program.output.splitlines() if any(map(line.__contains__, NOISE))]
        assert noisy == []
        assert program.is_gone(15.0)
    finally:
        program.kill()


def test_heartbeats_leave_no_session_behind(caplog: pytest.LogCaptureFixture) -> None:
    """Agent-lightning sends them from a thread whose event loop it closes."""
    from agl_fast.verl.store_sessions import close_sessions_of_heartbeats

    async def run(client: Any) -> None:
        close_sessions_of_heartbeats(client)
        await client.query_workers()
        beat = threading.Thread(target=lambda: asyncio.run(client.update_worker("Worker-0", {})))
        beat.start()
        await asyncio.to_thread(beat.join)
        assert len(client._sessions) == 1
        assert [worker.worker_id for worker in await client.query_workers()] == ["Worker-0"]
        await client.close()

    with caplog.at_level(logging.ERROR), served(new_store()) as server:
        asyncio.run(run(agentlightning.LightningStoreClient(server.url)))
        gc.collect()
    assert caplog.messages == []
