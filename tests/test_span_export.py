"""What agents emit arrives in the store, with Agent-lightning's own runners and tracer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("agentlightning", reason="needs the extra [cpu]")

SCRIPT = Path(__file__).with_name("emit_rewards.py")


def test_emitted_rewards_of_a_runner_process_arrive():
    ended = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    printed = [line for line in ended.stdout.splitlines() if line.startswith("[[")]
    assert [json.loads(line) for line in printed] == [[[1.0, 2.0], [2.0, 4.0]]]
