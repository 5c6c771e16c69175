import json
import subprocess
import sys
from importlib.metadata import version

import pytest

import agl_fast

HEAVY = {"torch", "numpy", "verl", "ray", "vllm"}
NEED_EXTRAS = {
    "AgentLightningTrainer",
    "AgentModeDaemon",
    "ConcurrentRunner",
    "LLMProxy",
    "RolloutTracer",
    "VERL",
}


def heavy_modules_after(statement: str) -> set[str]:
    code = f"{statement}; import json, sys; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return HEAVY & set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "statement",
    [
        "import agl_fast",
        "import agl_fast; agl_fast.Call([1], [2]), agl_fast.Rollout, agl_fast.EmptyBatchError",
        "import agl_fast.reference",
    ],
)
def test_import_loads_nothing_heavy(statement):
    assert heavy_modules_after(statement) == set()


def test_version_is_the_distribution_s():
    assert agl_fast.__version__ == version("agl-fast")


@pytest.mark.filterwarnings("ignore")  # of verl, Agent-lightning and what they import
@pytest.mark.parametrize("name", agl_fast.__all__)
def test_public_name_resolves(name):
    if name in NEED_EXTRAS:
        pytest.importorskip("verl", reason="needs the extra [cpu] or [verl]")
    assert getattr(agl_fast, name) is not None
    assert name in dir(agl_fast)
