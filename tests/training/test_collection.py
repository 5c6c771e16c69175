"""Runs with asynchronous collection, with the real daemon and proxy, without Ray or models."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu]")

import support.verl_trainer_imports  # noqa: F401
from support.collected_run import BATCH, EPOCHS, N_SAMPLES, N_STEPS, run
from support.training_loop import keep_logs

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl and what it imports


def require_every_sample_once_an_epoch(trained: list[list[int]]) -> None:
    assert Counter(number for _, number, _ in trained) == dict.fromkeys(range(N_SAMPLES), EPOCHS)


@pytest.mark.parametrize(
    ("mode", "max_staleness", "oversample"),
    [("partial", 0, 1.0), ("partial", 2, 2.0), ("overlap", 1, 1.0), ("overlap", 2, 3.0)],
)
def test_every_sample_is_trained_once_and_none_too_late(
    tmp_path, monkeypatch, mode, max_staleness, oversample
):
    logged = keep_logs(monkeypatch)
    loop = run(tmp_path, mode=mode, max_staleness=max_staleness, oversample=oversample)
    require_every_sample_once_an_epoch(loop.trained)
    assert Counter(step for step, _, _ in loop.trained) == dict.fromkeys(
        range(1, N_STEPS + 1), BATCH
    )
    assert max(step - 1 - oldest for step, _, oldest in loop.trained) <= max_staleness
    assert [step for step, _ in logged[:-1]] == list(range(1, N_STEPS + 1))
    assert logged[-2][1]["training/collection/groups"] == BATCH


def run_and_kill(folder: Path, seconds: float, mode: str) -> bool:
    """Run in a child process, which is killed after some time; whether it ended before."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run(folder, mode=mode)
            status = 0
        finally:
            os._exit(status)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert status == 0
            return True
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@pytest.mark.parametrize("mode", ["partial", "overlap"])
def test_a_run_that_is_killed_again_and_again_trains_every_sample_once(tmp_path, monkeypatch, mode):
    keep_logs(monkeypatch)
    draw = random.Random(mode)
    n_killed = 0
    while n_killed < 10 and not run_and_kill(tmp_path, draw.uniform(0.2, 0.9), mode):
        n_killed += 1
    loop = run(tmp_path, mode=mode)
    require_every_sample_once_an_epoch(loop.trained)
    assert n_killed >= 3
