"""A run that joins a Ray cluster: the cluster stays, and gets everything back."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu]")
pytest.importorskip("vllm", reason="needs the extra [cpu]")

from support.verl_runs import TIMEOUT_SECONDS, environment, lines, processes_marked, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT_SECONDS)]
RESOURCES = {"CPU": 16.0, "GPU": 1.0}
# Ray counts what an actor had a little later than it ends the actor.
FREE_RESOURCES = """
import json, sys, time, ray
wanted = json.loads(sys.argv[1])
ray.init(log_to_driver=False)
deadline = time.monotonic() + 60
while True:
    free = {name: ray.available_resources().get(name) for name in wanted}
    if free == wanted or time.monotonic() > deadline:
        break
    time.sleep(0.5)
print(json.dumps(free))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray", numbered=True)


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    with started_cluster(folder, RESOURCES) as joining:
        yield joining


@contextmanager
def started_cluster(folder: Path, resources: dict[str, float]) -> Iterator[dict[str, str]]:
    """The environment of those who join a cluster on the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    joining = {
        "RAY_ADDRESS": f"127.0.0.1:{port}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    ray = str(Path(sys.executable).with_name("ray"))
    temporary = tempfile.mkdtemp(prefix="ray-")  # a short path, for sockets
    where = ["--head", "--node-ip-address=127.0.0.1", f"--port={port}", "--block"]
    counts = [f"--num-{name.lower()}s={amount:g}" for name, amount in resources.items()]
    what = [*counts, f"--temp-dir={temporary}", "--include-dashboard=false"]
    started = subprocess.Popen(
        [ray, "start", *where, *what],
        env={**environment(mark_of_cluster(folder), **joining), "RAY_ADDRESS": ""},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert free_resources(joining, resources) == resources
        yield joining
    finally:
        started.send_signal(signal.SIGTERM)
        started.wait(timeout=60)
        shutil.rmtree(temporary, ignore_errors=True)


def mark_of_cluster(folder: Path) -> Path:
    return Path("cluster") / folder.name


def free_resources(joining: dict[str, str], wanted: dict[str, float]) -> dict[str, float]:
    asked = subprocess.run(
        [sys.executable, "-c", FREE_RESOURCES, json.dumps(wanted)],
        env={**os.environ, **joining},
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr[-2000:]
    return json.loads(asked.stdout.splitlines()[-1])


def test_a_cluster_that_is_there_is_used_and_stays(folder, cluster):
    finished = run(folder, "--config", "trajectory", "--steps", "1", **cluster)
    assert finished.returncode == 0, finished.output[-4000:]
    assert [line["step"] for line in lines(folder / "metrics-1.jsonl")] == [0, 1]
    assert finished.processes_left == []
    assert finished.segments_left == set()
    assert free_resources(cluster, RESOURCES) == RESOURCES
    of_cluster = processes_marked(f"AGL_FAST_TEST={mark_of_cluster(folder)}")
    assert "raylet\n" in of_cluster
    assert not [name for name in of_cluster if name.startswith(("VLLM", "ray::vLLM", "ray::W"))]


def test_a_cluster_without_a_cpu_for_the_server_ends_the_run_soon(tmp_path_factory):
    """Three are enough for verl's worker."""
    folder = tmp_path_factory.mktemp("ray", numbered=True)
    resources = {"CPU": 3.0, "GPU": 1.0}
    with started_cluster(folder, resources) as joining:
        finished = run(folder, "--config", "impatient", "--steps", "1", **joining)
        assert free_resources(joining, resources) == resources
    assert finished.returncode != 0
    waited = "after 10 s (agentlightning.deadlines.room_seconds)"
    assert f"the Ray cluster has insufficient resources {waited}" in finished.output
    assert "needs CPU 4, available 3 of 3" in finished.output
    assert finished.processes_left == []
    assert finished.segments_left == set()
    assert not (folder / "metrics-1.jsonl").exists()
