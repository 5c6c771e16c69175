"""The packages that the doctor names for GPUs can be had together.

Resolved, not installed, for Linux on x86-64, from the index that uv is configured with.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agl_fast.doctor import install_command, overrides_file, pinned_packages

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NO_NETWORK = re.compile(
    r"dns error|failed to lookup|Connection refused|tcp connect error|timed out|offline",
    re.IGNORECASE,
)
UV = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))


def resolve(target: str, python: str, packages: list[str], *options: str) -> dict[str, str]:
    """The versions that uv finds; skips where an index does not answer."""
    command = [UV, "pip", "compile", "-", "--no-header", "--no-annotate", "--quiet"]
    command += ["--python-version", python, "--python-platform", "x86_64-unknown-linux-gnu"]
    command += ["--override", str(overrides_file(target)), *options]
    asked = subprocess.run(
        command,
        input="\n".join([*packages, "numpy>=1.24", "torch>=2.6", ""]),
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode and NO_NETWORK.search(asked.stderr):
        pytest.skip(f"no network: {asked.stderr.strip().splitlines()[-1]}")
    assert asked.returncode == 0, asked.stderr
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", asked.stdout, re.MULTILINE))


def asked_for(target: str) -> tuple[list[str], list[str]]:
    """Packages and options of the doctor's command."""
    command = install_command(target)
    words = shlex.split(command)
    packages = [word for word in words if "==" in word or " @ " in word]
    options = []
    if "--torch-backend" in words:
        options = ["--torch-backend", words[words.index("--torch-backend") + 1]]
    return packages, options


def assert_proven(found: dict[str, str]) -> None:
    pins = pinned_packages("cuda13")
    assert {name: found[name] for name in pins if name != "vllm"} == {
        name: version for name, version in pins.items() if name != "vllm"
    }
    assert found["torch"].startswith("2.11.")  # verl's own extras and vLLM 0.24 name it
    assert found["packaging"].startswith("25.")


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12"])
def test_the_set_for_cuda_13_resolves(python):
    packages, options = asked_for("cuda13")
    found = resolve("cuda13", python, packages, *options)
    assert_proven(found)
    assert found["vllm"] == pinned_packages("cuda13")["vllm"]
    assert any(name.endswith("cu13") for name in found)


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12"])
def test_the_set_for_cuda_12_resolves(python):
    """Its wheels are files of vLLM's releases and of PyTorch's index."""
    packages, options = asked_for("cuda12")
    assert options == ["--torch-backend", "cu129"]
    found = resolve("cuda12", python, packages, *options)
    assert_proven(found)
    assert found["torch"].endswith("+cu129")
