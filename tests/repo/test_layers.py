"""Imports point one way.

quickstart -> algorithm -> verl.entrypoint -> training -> rollouts -> proxy -> verl (configuration,
    supervision) -> recording -> rows -> ops -> _core, _cuda

Read from the sources, so that imports inside functions and TYPE_CHECKING blocks count, too.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT

PACKAGE = ROOT / "python" / "agl_fast"

# Top to bottom: a room uses itself and the rooms below it. `agl_fast/__init__.py` opens them all.
STOREYS = [
    {"quickstart", "commands", "doctor", "__main__"},
    {"algorithm"},
    {"runner"},  # in the processes of the agents
    # what starts a run, and what says whether one could start
    {
        "verl.entrypoint",
        "verl.preflight",
        "verl.ray_cluster",
        "tools.dry_run",
        "tools.replay",
        "tools.export",
    },
    {"training"},
    {"rollouts"},
    {"proxy"},
    {"verl"},  # configuration, supervision, membership
    {"training.credit"},
    {"training.losses"},  # pickled into every worker that trains
    {"tools.analyze"},
    {"recording"},
    {"rows"},
    {"ops", "model_facts", "printable", "tools", "_moved"},
    {"_core", "_cuda"},
]
NOWHERE = len(STOREYS)
PLATFORM = "verl.platform_cpu"
# Rooms beside the stairs use exactly these.
ANNEXES = {
    "reference": {"reference", "rows.accounting", "rows.options"},
    PLATFORM: {PLATFORM, "verl.supervision.load_errors"},
    "verl.vllm_extension": {"verl.supervision.load_errors"},
    "verl.gpu_workers": {PLATFORM},
    "tree": {"tree", PLATFORM, "model_facts"},  # workers and engines for trees
}
# What a configuration needs to know of the engine for trees.
FACTS_OF_ENGINES = ("tree.engine_name", "tree.refusals")
FOREIGN = {
    "reference": {"numpy", "torch", "verl", "ray", "vllm"},
    "ops": {"verl", "ray", "vllm"},
    "rows": {"verl", "ray", "vllm"},
    "recording": {"verl", "ray", "vllm", "torch", "agentlightning"},
    "tools.analyze": {"verl", "ray", "vllm", "torch"},
}

MODULES = sorted(path for suffix in ("py", "pyi") for path in PACKAGE.rglob(f"*.{suffix}"))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports(path: Path) -> Iterator[str]:
    package = ["agl_fast", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            # `from agl_fast import ops` means the module, not a name of the package.
            yield from (f"agl_fast.{a.name}" for a in node.names) if base == "agl_fast" else (base,)


def inner_imports(path: Path) -> Iterator[str]:
    for name in imports(path):
        if name == "agl_fast" or name.startswith("agl_fast."):
            yield name.removeprefix("agl_fast").removeprefix(".")


def is_within(name: str, room: str) -> bool:
    return name == room or name.startswith(f"{room}.")


def storey_of(name: str) -> int:
    # A room inside another is the one that is meant: verl.losses, not verl.
    levels = {room: level for level, rooms in enumerate(STOREYS) for room in rooms}
    within = [room for room in levels if is_within(name, room)]
    return levels[max(within, key=len)] if within else NOWHERE


def may_import(user: str, used: str) -> bool:
    for room, allowed in ANNEXES.items():
        if is_within(user, room):
            return any(is_within(used, other) for other in allowed)
    if used == "":  # the public names, for those who stand above what is behind them
        return storey_of(user) < storey_of("rows")
    if used in FACTS_OF_ENGINES:
        return storey_of(user) <= storey_of("verl")
    if any(is_within(used, room) for room in (PLATFORM, "tree")):
        return storey_of(user) <= storey_of("verl.entrypoint")  # it names its workers
    if is_within(used, "verl.gpu_workers"):
        return storey_of(user) <= storey_of("verl.entrypoint")
    if any(is_within(used, room) for room in ANNEXES):
        return False
    return storey_of(user) <= storey_of(used) < NOWHERE


@pytest.mark.parametrize("path", [p for p in MODULES if name_of(p)], ids=relative)
def test_imports_point_down(path):
    user = name_of(path)
    wrong = [used for used in inner_imports(path) if not may_import(user, used)]
    assert not wrong, f"agl_fast.{user} must not import {wrong}"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_foreign_imports(path):
    banned = {name for room in FOREIGN if is_within(name_of(path), room) for name in FOREIGN[room]}
    wrong = [used for used in imports(path) if used.split(".")[0] in banned]
    assert not wrong


def uses_verls_trainer(path: Path) -> bool:
    """Whether code, not a docstring or a message, names the module or the class."""
    tree = ast.parse(path.read_text())
    names = {
        getattr(node, field, None)
        for node in ast.walk(tree)
        for field in ("id", "attr", "name")  # a variable, an attribute, an imported name
    }
    module = "verl.trainer.ppo.ray_trainer"
    return "RayPPOTrainer" in names or any(is_within(name, module) for name in imports(path))


def test_one_module_depends_on_verls_trainer():
    """verl has deprecated RayPPOTrainer: its replacement must cost one file."""
    users = [relative(path) for path in MODULES if uses_verls_trainer(path)]
    assert users == ["python/agl_fast/training/trainer.py"]


@pytest.mark.parametrize("path", sorted((ROOT / "csrc").rglob("*.*")), ids=relative)
def test_native_includes_point_down(path):
    room = path.parent.name
    quoted = re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.MULTILINE)
    system = re.findall(r"^\s*#\s*include\s*<([^>]+)>", path.read_text(), re.MULTILINE)
    foreign = {
        "core": r"Python\.h|pybind11|torch|ATen|c10|cuda|thrust|cub",
        "cuda": r"Python\.h|pybind11|torch|ATen|c10",
        "bindings": r"torch|ATen|c10",
    }[room]
    below = {"core": {"core"}, "cuda": {"core", "cuda"}, "bindings": {"core", "cuda", "bindings"}}
    assert [name for name in quoted if name.split("/")[0] not in below[room]] == []
    assert [name for name in system if re.match(foreign, name)] == []


def test_rules_catch_what_they_forbid():
    assert may_import("rows.builder", "ops.fill")
    assert may_import("training", "rows")
    assert may_import("tree.engine", "verl.platform_cpu")
    assert may_import("reference.build", "rows.accounting")
    assert may_import("training", "")
    assert may_import("training", "training.losses.policy")
    assert not may_import("training.losses.policy", "training")
    assert not may_import("training.losses.policy", "verl.config")
    assert may_import("verl.entrypoint", "verl.platform_cpu.cpu_workers")
    assert may_import("verl.entrypoint", "tree.tree_workers")
    assert not may_import("ops.pad", "rows")
    assert not may_import("ops.pad", "")
    assert not may_import("training", "verl.platform_cpu.cpu_workers")
    assert not may_import("rows.builder", "training")
    assert not may_import("proxy", "rollouts")
    assert not may_import("training", "tree.tree_workers")
    assert may_import("verl.config.attention_choice", "tree.refusals")
    assert not may_import("verl.config.attention_choice", "tree.engine")
    assert not may_import("rows.builder", "reference")
    assert not may_import("rows.builder", "recording")
    assert not may_import("recording.reader", "rollouts")
    assert not may_import("tree.engine", "training")
    assert not may_import("verl.platform_cpu.engines", "rows")
    assert not may_import("reference.build", "rows.builder")
    assert not may_import("ops.pad", "pad_left")
