"""Which device a run takes: from the user, this machine and the Ray cluster it joins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu] or [verl]")

import ray
import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA

from agl_fast.verl import device_choice
from agl_fast.verl.config import compose
from agl_fast.verl.device_choice import (
    ADDRESS,
    CPU,
    DEVICE,
    Device,
    choose_device,
    local_accelerator,
)
from agl_fast.verl.platform_cpu import CpuPlatform
from support.verl_settings import documented

CLUSTER = "10.0.0.1:6379"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine without a GPU, a torch for CUDA, and the resources of a cluster."""
    facts: dict[str, Any] = {"gpu": False, "cluster": {}, "asked": []}
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(
        PlatformCUDA, "is_platform_available", lambda self, use_smi_check=False: facts["gpu"]
    )

    def ask(address: str) -> subprocess.CompletedProcess[str]:
        facts["asked"].append(address)
        if facts["cluster"] is None:
            error = "Traceback …\nConnectionError: no Ray at the address"
            return subprocess.CompletedProcess([], 1, "", error)
        return subprocess.CompletedProcess([], 0, json.dumps(facts["cluster"]) + "\n", "")

    monkeypatch.setattr(device_choice, "_ask", ask)
    return facts


def test_a_machine_with_a_gpu_trains_on_it(machine):
    machine["gpu"] = True
    assert choose_device({}) == Device("cuda")
    assert choose_device({DEVICE: "cuda"}) == Device("cuda")
    assert choose_device({ADDRESS: CLUSTER}) == Device("cuda")
    assert machine["asked"] == []


def test_a_user_may_leave_the_gpu_alone(machine):
    machine["gpu"] = True
    assert choose_device({DEVICE: "cpu"}) == Device("cpu")


def test_a_machine_without_one_trains_on_its_cpus(machine):
    assert choose_device({}) == Device("cpu")


@pytest.mark.parametrize("how", ["setting", "environment"])
def test_a_driver_without_a_gpu_trains_on_those_of_the_cluster(machine, monkeypatch, how):
    machine["cluster"] = {"CPU": 64.0, "GPU": 16.0, "accelerator_type:H200": 2.0}
    user = {ADDRESS: CLUSTER} if how == "setting" else {}
    if how == "environment":
        monkeypatch.setenv("RAY_ADDRESS", CLUSTER)
    chosen = choose_device(user)
    assert chosen.name == "cuda"
    (line,) = chosen.lines
    assert line == (
        f"trainer.device=cuda: this machine has no GPU, and the Ray cluster ({CLUSTER}) has H200"
    )
    assert machine["asked"] == [CLUSTER]


def test_gpus_that_ray_only_counts_are_none(machine):
    """`ray start --num-gpus 2` on a machine with CPUs, as runs on CPUs need it."""
    machine["cluster"] = {"CPU": 16.0, "GPU": 2.0}
    chosen = choose_device({ADDRESS: CLUSTER})
    assert chosen.name == "cpu"
    assert "if they have some, set trainer.device=cuda" in chosen.lines[0]


def test_the_user_decides_for_a_cluster(machine):
    chosen = choose_device({ADDRESS: CLUSTER, DEVICE: "cuda"})
    assert chosen.name == "cuda"
    assert f"the workers run on the Ray cluster ({CLUSTER})" in chosen.lines[0]
    assert choose_device({ADDRESS: CLUSTER, DEVICE: "cpu"}) == Device("cpu")
    assert machine["asked"] == []


def test_a_connected_process_asks_its_cluster(machine, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"accelerator_type:A100": 1.0})
    assert choose_device({}).name == "cuda"
    assert machine["asked"] == []


def test_a_gpu_that_is_nowhere_is_an_error(machine):
    with pytest.raises(
        ValueError, match=r"trainer.device='cuda': expected 'cpu', as this machine "
    ):
        choose_device({DEVICE: "cuda"})
    for address in ("local", ""):
        with pytest.raises(ValueError, match=r"the run joins no Ray cluster.*RAY_ADDRESS"):
            choose_device({DEVICE: "cuda", ADDRESS: address})


def test_a_cluster_that_does_not_answer_is_an_error(machine):
    machine["cluster"] = None
    with pytest.raises(ValueError, match=r"no cluster answers: ConnectionError.*trainer.device"):
        choose_device({ADDRESS: CLUSTER})


def test_a_card_that_torch_is_not_built_for_is_none(machine, monkeypatch):
    machine["gpu"] = True
    assert local_accelerator() == "cuda"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert local_accelerator() is None
    with pytest.raises(ValueError, match="torch is built for CPUs here"):
        choose_device({DEVICE: "cuda"})


def test_the_environment_of_verl_comes_first(machine, monkeypatch):
    machine["gpu"] = True
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    assert choose_device({}) == Device("cpu")
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")
    machine["gpu"] = False
    assert choose_device({}) == Device("cuda")
    monkeypatch.setenv("VERL_PLATFORM", "tpu")
    with pytest.raises(ValueError, match=r"VERL_PLATFORM='tpu': expected one of nvidia"):
        choose_device({})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_configuration_and_verl_follow(machine, monkeypatch, device):
    """The whole configuration, without a GPU on this machine, for a cluster with and without."""
    from verl.plugin.platform import get_platform, platform_manager

    monkeypatch.setattr(platform_manager, "_current_platform", None)
    machine["cluster"] = {"GPU": 1.0} | ({"accelerator_type:H200": 1.0} if device == "cuda" else {})
    composed = compose(documented(ray_kwargs__ray_init__address=CLUSTER))
    assert composed.config.trainer.device == device
    assert get_platform().device_name == device
    assert any(line.startswith(f"trainer.device={device}: ") for line in composed.lines)
    on_cpu = [line for line in composed.lines if line.startswith("on this CPU")]
    assert bool(on_cpu) == (device == "cpu")


def test_a_platform_that_verl_chose_before_is_replaced(monkeypatch):
    from verl.plugin.platform import get_platform, platform_manager

    monkeypatch.setattr(platform_manager, "_current_platform", PlatformCUDA())
    device_choice.use_device(CPU)
    assert isinstance(get_platform(), CpuPlatform)


# In processes of their own, as nothing else may have been chosen in them.
PLAIN_VERL = """
import verl
from verl.utils.device import get_device_name
from verl.plugin.platform import PlatformRegistry
print(get_device_name(), "cpu" in PlatformRegistry.registered_names())
"""
OF_WORKERS = """
from agl_fast.verl.config import compose
compose({"algorithm": {"adv_estimator": "grpo"}})
from agl_fast.verl import entrypoint
from verl.plugin.platform import get_platform
print(entrypoint.environment_of_workers(), get_platform().rollout_env_vars().get("VERL_PLATFORM"))
"""


def last_line(code: str, **environment: str) -> str:
    inherited = {k: v for k, v in os.environ.items() if k not in ("VERL_PLATFORM", "RAY_ADDRESS")}
    finished = subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip().splitlines()[-1]


@pytest.fixture
def _real_subprocesses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()


@pytest.mark.usefixtures("_real_subprocesses")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_runs_of_verl_alone_are_what_they_were():
    """Without a GPU verl takes its CUDA platform, with agl_fast installed as without."""
    assert last_line(PLAIN_VERL) == "cuda True"
    assert last_line(PLAIN_VERL, VERL_USE_EXTERNAL_PLUGINS="none") == "cuda False"
    assert last_line(PLAIN_VERL, VERL_PLATFORM="cpu") == "cpu True"


@pytest.mark.usefixtures("_real_subprocesses")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_workers_of_a_run_on_cpus_are_told(machine):
    """They choose in processes of their own, on any node of the cluster."""
    assert last_line(OF_WORKERS) == "{'VERL_PLATFORM': 'cpu'} cpu"
