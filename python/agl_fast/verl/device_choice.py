"""Choice of the device of a run, made once from the user, this machine and the Ray cluster.

verl chooses anew in every process, and assumes an NVIDIA card on a machine without an accelerator.
A driver without a GPU may belong to a cluster with GPUs or to a CPU run. Only `VERL` knows which.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
import torch
from verl.plugin.platform import PlatformRegistry, platform_manager, set_platform

PLATFORM_VARIABLE = "VERL_PLATFORM"
DEVICE = "trainer.device"
ADDRESS = "ray_kwargs.ray_init.address"
CPU = "cpu"
CONNECTED = "the one that this process is connected to"
# "GPU" is a declared number. Ray adds this resource for a card that it has detected itself.
FOUND_BY_RAY = "accelerator_type:"
CLUSTER_SECONDS = 120
_ASK_CLUSTER = """
import json, os, ray
ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")
print(json.dumps(ray.cluster_resources()))
"""


@dataclass(frozen=True)
class Device:
    """Device of the workers of a run.

    Attributes:
        name: verl's: 'cpu', 'cuda' or 'npu'.
        lines: messages for the user; none if this machine's accelerator decides.
    """

    name: str
    lines: tuple[str, ...] = ()


def choose_device(user: Mapping[str, Any]) -> Device:
    """Choose the device of a run.

    The first of: `VERL_PLATFORM`, `trainer.device`, this machine's accelerator, the GPUs of the Ray
    cluster that the run joins, the CPU.

    Args:
        user: the user's settings by dotted key.

    Raises:
        ValueError: `trainer.device` is a device that neither this machine nor a cluster has; the
            cluster does not answer.
    """
    asked = user.get(DEVICE)
    here = _of_environment() or local_accelerator()
    if here is not None or asked == CPU:
        # If the two differ, the checks of the configuration refuse one of them.
        return Device(CPU if asked == CPU else str(here))
    address = ray_address(user)
    if asked is not None:
        if address is None:
            raise ValueError(
                f"{DEVICE}={asked!r}: expected 'cpu', as {_why_none_here()} and the run joins no "
                f"Ray cluster; to train on the GPUs of one, set {ADDRESS} or RAY_ADDRESS"
            )
        said = f"{_why_none_here()}; the workers run on the Ray cluster ({address})"
        return Device(asked, (f"{DEVICE}={asked}: {said}",))
    if address is None:
        return Device(CPU)
    kinds = accelerators_of_cluster(address)
    if kinds:
        found = f"the Ray cluster ({address}) has {', '.join(kinds)}"
        return Device("cuda", (f"{DEVICE}=cuda: {_why_none_here()}, and {found}",))
    said = (
        f"{DEVICE}=cpu: {_why_none_here()}, and Ray has found none on the nodes of the cluster "
        f"({address}); if they have some, set {DEVICE}=cuda"
    )
    return Device(CPU, (said,))


def use_device(name: str) -> None:
    """Set verl's device in this process.

    Raises:
        RuntimeError: agl_fast's platform for CPUs is not registered with verl.
    """
    current = platform_manager._current_platform  # get_platform() would choose one first
    if current is not None and current.device_name == name:
        return
    platforms = {CPU: CPU, "cuda": "amd" if torch.version.hip else "nvidia"}
    if name not in platforms:
        return  # verl finds it itself
    platform = PlatformRegistry.get(platforms[name])
    if platform is None:
        raise RuntimeError(
            f"verl has no platform {platforms[name]!r}: expected its plugin agl_fast_cpu to be "
            "loaded; install agl_fast in this environment and leave VERL_USE_EXTERNAL_PLUGINS unset"
        )
    set_platform(platform())


def local_accelerator() -> str | None:
    """verl's name of this machine's accelerator, if torch supports it.

    Like verl's own detection, which asks `nvidia-smi` before torch, without agl_fast's `cpu`.
    """
    for name in PlatformRegistry.registered_names():
        platform_cls = PlatformRegistry.get(name)
        if name == CPU or platform_cls is None:
            continue
        platform = platform_cls()
        if platform.is_platform_available(use_smi_check=True) and not _lacks_its_torch(platform):
            return str(platform.device_name)
    return None


def ray_address(user: Mapping[str, Any]) -> str | None:
    """Address of the cluster that the run joins; None: it starts a cluster."""
    if ray.is_initialized():
        return CONNECTED
    address = user.get(ADDRESS) or os.environ.get("RAY_ADDRESS")
    return None if address in (None, "", "local") else str(address)


def accelerators_of_cluster(address: str) -> list[str]:
    """Kinds of cards that Ray has detected on the cluster's nodes.

    A separate process connects, as this one connects later, with the options of the run.

    Raises:
        ValueError: the cluster does not answer.
    """
    if address == CONNECTED:
        resources = ray.cluster_resources()
    else:
        asked = _ask(address)
        if asked.returncode:
            cause = (asked.stderr.strip().splitlines() or ["no message"])[-1]
            raise ValueError(
                f"Ray address {address!r} ({ADDRESS} or RAY_ADDRESS): no cluster answers: {cause}; "
                f"start it first, or set {DEVICE} to decide without it"
            )
        resources = json.loads(asked.stdout.splitlines()[-1])
    kinds = (name.removeprefix(FOUND_BY_RAY) for name in resources if FOUND_BY_RAY in name)
    return sorted(kinds)


def _ask(address: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _ASK_CLUSTER],
        env={**os.environ, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=CLUSTER_SECONDS,
        check=False,
    )


def _of_environment() -> str | None:
    name = os.environ.get(PLATFORM_VARIABLE, "").strip().lower()
    if not name:
        return None
    platform_cls = PlatformRegistry.get(name)
    if platform_cls is None:
        known = ", ".join(PlatformRegistry.registered_names())
        raise ValueError(f"{PLATFORM_VARIABLE}={name!r}: expected one of {known}, or nothing")
    return str(platform_cls().device_name)


def _lacks_its_torch(platform: Any) -> bool:
    return platform.device_name == "cuda" and not (torch.version.cuda or torch.version.hip)


def _why_none_here() -> str:
    built = torch.version.cuda or torch.version.hip
    return "this machine has no GPU" if built else "torch is built for CPUs here"
