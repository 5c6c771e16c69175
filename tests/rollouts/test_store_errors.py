"""Runners of `join` do not log a traceback for every try to reach a store that has gone."""

from __future__ import annotations

import asyncio
import logging

import pytest

pytest.importorskip("aiohttp", reason="needs the extra [cpu] or [verl]")

import aiohttp

from agl_fast.commands.store_errors import LOGGERS, is_lost_connection, quiet_store_errors

RUNNER = "agentlightning.runner.agent"


@pytest.fixture
def quiet():
    before = {name: list(logging.getLogger(name).filters) for name in LOGGERS}
    quiet_store_errors()
    quiet_store_errors()
    yield
    for name, filters in before.items():
        logging.getLogger(name).filters[:] = filters


async def asked_nobody() -> None:
    async with aiohttp.ClientSession() as session:
        await session.get("http://127.0.0.1:9")


def log(message: str, error: BaseException) -> None:
    try:
        raise error
    except BaseException:
        logging.getLogger(RUNNER).warning(message, exc_info=True)


@pytest.mark.usefixtures("quiet")
def test_only_the_store_is_left_out(caplog):
    with pytest.raises(aiohttp.ClientConnectionError) as refused:
        asyncio.run(asked_nobody())
    log("[Worker 0] Heartbeat consumer: update failed.", refused.value)
    logging.getLogger("agentlightning.store.client").error("Server is not healthy yet. Retrying")
    assert caplog.text == ""
    log("[Worker 0] Heartbeat consumer: update failed.", ValueError("no such worker"))
    log("[Worker 0 | Rollout ro-1] Exception during rollout.", ConnectionError("the agent's tool"))
    logging.getLogger(RUNNER).warning("without an error")
    assert [record.exc_info is not None for record in caplog.records] == [True, True, False]


def test_a_lost_connection_is_found_behind_other_errors():
    outer = RuntimeError("the store failed")
    outer.__cause__ = ConnectionResetError("gone")
    assert is_lost_connection(outer)
    assert is_lost_connection(TimeoutError())
    assert not is_lost_connection(RuntimeError("else"))
    looped = RuntimeError()
    looped.__context__ = looped
    assert not is_lost_connection(looped)
