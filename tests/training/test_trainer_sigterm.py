"""SIGTERM to all processes of a run, as from `timeout` and Slurm: Ray's own die with the rest."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import SUPPORT

pytest.importorskip("verl", reason="needs the extra [cpu]")

from agl_fast.verl.supervision.leftovers import processes_of_run

SCRIPT = SUPPORT.joinpath("sigterm_run.py")
SECONDS = 120


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
def test_sigterm_to_the_group_ends_the_run_and_leaves_nothing(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with (tmp_path / "stderr").open("w+") as errors:
        run = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            env=environment | {"RAY_USAGE_STATS_ENABLED": "0", "VERL_PLATFORM": "cpu"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            assert run.stdout is not None
            lines = iter(run.stdout.readline, "")
            until_training = list(itertools.takewhile(lambda line: line != "training\n", lines))
            errors.seek(0)
            assert run.poll() is None, errors.read()
            mark = until_training[-1].strip()
            assert processes_of_run(mark) != []
            os.killpg(run.pid, signal.SIGTERM)
            os.kill(run.pid, signal.SIGTERM)  # `timeout` sends it twice
            rest, _ = run.communicate(timeout=SECONDS)
        finally:
            run.kill()
            run.wait()
        errors.seek(0)
        said = errors.read()
        assert run.returncode == 128 + signal.SIGTERM, said
    assert rest.splitlines() == ["the loop has ended"]
    assert said.splitlines().count("agl_fast: interrupted by SIGTERM in step 2 of 9") == 1
    assert processes_of_run(mark) == []
