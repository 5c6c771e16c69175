"""A run that joins a Ray cluster: the cluster stays, and gets all of its resources back."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu]")
pytest.importorskip("vllm", reason="needs the extra [cpu]")

from verl_runs import TIMEOUT_SECONDS, environment, lines, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT_SECONDS)]
START_SECONDS = 120.0
FREE = "import json, ray; ray.init(); print(json.dumps(ray.available_resources()))"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray", numbered=True)


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """Of a cluster that the test ends by itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ray = Path(sys.executable).with_name("ray")
    options = ["--num-cpus=16", "--num-gpus=1", "--include-dashboard=false"]
    cluster = subprocess.Popen(
        [str(ray), "start", "--head", "--block", f"--port={port}", *options],
        env=environment(folder),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    address = f"127.0.0.1:{port}"
    try:
        wait_for(cluster, port)
        yield address
    finally:
        os.killpg(cluster.pid, signal.SIGTERM)
        cluster.wait(timeout=60)


def wait_for(cluster: subprocess.Popen[Any], port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert cluster.poll() is None, f"ray start ended with {cluster.returncode}"
        assert time.monotonic() < deadline, "ray start takes too long"
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.5)
        else:
            return


def free_resources(folder: Path, address: str) -> dict[str, float]:
    asked = subprocess.run(
        [sys.executable, "-c", FREE],
        env=environment(folder, RAY_ADDRESS=address),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(asked.stdout.splitlines()[-1])


def test_a_cluster_that_is_there_is_used_and_stays(folder, address):
    before = free_resources(folder, address)
    finished = run(folder, "--config", "trajectory", "--steps", "1", RAY_ADDRESS=address)
    assert finished.returncode == 0, finished.output[-4000:]
    assert "Started a local Ray instance" not in finished.output
    assert [line["step"] for line in lines(folder / "metrics-1.jsonl")] == [0, 1]
    assert finished.segments_left == set()
    after = free_resources(folder, address)
    assert {name: after[name] for name in ("CPU", "GPU")} == {"CPU": 16.0, "GPU": 1.0}
    assert after.keys() == before.keys()  # no placement group is left
    assert not [name for name in finished.processes_left if "vLLM" in name or "VLLM" in name]
