"""verl's `cpu` platform: registered by the plugin entry point, chosen by verl, checked by us."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import agl_fast

pytest.importorskip("verl", reason="needs the extra [cpu] or [verl]")

PLATFORM_SOURCES = sorted((Path(agl_fast.__file__).parent / "verl" / "platform_cpu").glob("*.py"))


def run_python(code: str, **environment: str) -> str:
    """The last line that `code` prints in a fresh interpreter."""
    finished = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip().splitlines()[-1]


def test_import_verl_registers_platform_and_workers_bring_engines() -> None:
    code = """
import json
import verl
from verl.plugin.platform import PlatformRegistry
from verl.utils.device import get_device_name
facts = {"names": PlatformRegistry.registered_names(), "device": get_device_name()}
from verl.plugin.platform import get_platform
facts["memory"] = get_platform().device_module.max_memory_allocated()
import agl_fast.verl.platform_cpu.cpu_workers
from agl_fast.verl.platform_cpu.registration import require_cpu
facts["state"] = require_cpu(engines=True)
print(json.dumps(facts))
"""
    facts = json.loads(run_python(code, VERL_PLATFORM="cpu"))
    assert facts["device"] == "cpu"
    # Asked after verl's own platforms, so that it cannot take over from them.
    assert facts["names"][-1] == "cpu"
    assert len(facts["names"]) > 1
    assert facts["memory"] > 0
    assert facts["state"]["platform"] == "CpuPlatform"
    assert {"language_model/fsdp2", "value_model/fsdp2"} <= set(facts["state"]["engines"])


def test_verl_chooses_another_platform_where_cuda_is() -> None:
    code = """
import torch
torch.cuda.is_available = lambda: True
import verl
from verl.utils.device import get_device_name
print(get_device_name())
"""
    assert run_python(code, VERL_PLATFORM="") == "cuda"


def test_what_is_missing_raises_by_name() -> None:
    code = """
import verl
from verl.utils.device import get_device_name
from agl_fast.verl.platform_cpu.registration import require_cpu
try:
    require_cpu(engines=True)
except RuntimeError as error:
    print(error)
"""
    # verl has no plugin and settles on its fallback before ours is imported.
    message = run_python(code, VERL_PLATFORM="nvidia", VERL_USE_EXTERNAL_PLUGINS="none")
    assert "verl chose 'cuda'" in message
    assert "engine language_model/fsdp2" in message


ALLOWED = ("agl_fast.verl.platform_cpu", "agl_fast.verl.supervision.load_errors")


def test_platform_cpu_imports_nothing_else_of_agl_fast() -> None:
    assert PLATFORM_SOURCES
    for source in PLATFORM_SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{source.name}: relative import"
                names = [node.module or ""]
            ours = [name for name in names if name.split(".")[0] == "agl_fast"]
            assert all(name.startswith(ALLOWED) for name in ours), source.name
