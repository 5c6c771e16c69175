"""What every test module shares: Hypothesis's settings, and either implementation as a fixture."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings

from support.paths import ROOT, TESTS

# What tests train in their own processes, they train on CPUs. Runs of their own choose themselves.
os.environ.setdefault("VERL_PLATFORM", "cpu")

# No test needs a model of the hub. Without a network every look-up would wait for half a minute.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# pytest's pythonpath, for scripts that tests start in processes of their own and Ray's workers.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(TESTS), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# Batches of simulated agents take longer than Hypothesis's 200 ms now and then.
# `pytest --hypothesis-profile=thorough` looks further.
settings.register_profile("agl_fast", deadline=None, print_blob=True, max_examples=60)
settings.register_profile("thorough", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile("agl_fast")


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Returns what agl_fast has logged so far at level INFO."""
    caplog.set_level(logging.INFO, "agl_fast")
    return lambda: [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("agl_fast.") and record.levelno == logging.INFO
    ]


@pytest.fixture(params=["reference", "native"])
def build(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """``build_batch`` of plain rollouts, by the reference or natively, as lists."""
    # Imported here: it needs torch, and not every test does.
    from support.implementations import BUILDS

    return BUILDS[request.param]
