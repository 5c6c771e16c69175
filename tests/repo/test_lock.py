"""requirements-cpu.lock: the versions that `make setup` installs."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.paths import ROOT

LOCK = ROOT / "requirements-cpu.lock"
OVERRIDES = ROOT / "python/agl_fast/install/overrides-cpu.txt"
PYTHONS = ("3.10", "3.11", "3.12")


def requirements(text: str) -> list[Requirement]:
    lines = (line.partition(" #")[0].strip() for line in text.splitlines())
    return [Requirement(line) for line in lines if line and line[0].isalpha()]


def applies(requirement: Requirement, python: str) -> bool:
    environment = {"python_version": python, "python_full_version": f"{python}.9"}
    return requirement.marker is None or requirement.marker.evaluate(environment)


def locked(python: str) -> dict[str, str]:
    """Versions by name on this platform."""
    found: dict[str, str] = {}
    for each in requirements(LOCK.read_text()):
        if applies(each, python):
            (pin,) = each.specifier
            assert pin.operator == "==", each
            name = canonicalize_name(each.name)
            assert found.setdefault(name, pin.version) == pin.version, f"two of {name}"
    return found


def wanted(python: str) -> list[Requirement]:
    """What pyproject.toml asks for on a CPU, with overrides applied, without torch."""
    text = (ROOT / "pyproject.toml").read_text()
    found = []
    for key in ("dependencies", "cpu", "examples", "test", "dev"):
        (listed,) = re.findall(rf"^{key} = \[(.*?)\](?: #.*)?$", text, re.DOTALL | re.MULTILINE)
        found += [Requirement(each) for each in re.findall(r'"(.*?)"', listed)]
    overrides = [each for each in requirements(OVERRIDES.read_text()) if applies(each, python)]
    overridden = {each.name for each in requirements(OVERRIDES.read_text())}
    found = [each for each in found if each.name not in overridden] + overrides
    # torch is pinned by its override alone: its CPU builds are not on PyPI.
    return [each for each in found if each.name not in ("agl-fast", "torch")]


@pytest.mark.parametrize("python", PYTHONS)
def test_lock_has_what_pyproject_asks_for(python: str) -> None:
    versions = locked(python)
    assert len(wanted(python)) > 20
    for each in wanted(python):
        assert each.specifier.contains(versions[canonicalize_name(each.name)], prereleases=True), (
            f"{each}: make lock"
        )


def test_lock_names_no_index_and_no_folder() -> None:
    for line in LOCK.read_text().splitlines():
        assert re.match(r"#|[\w.-]+==[\w.+]+( ; .*)?$", line), line


def test_environment_is_the_locked_one() -> None:
    pytest.importorskip("vllm", reason="needs the extra [cpu]")
    here = ".".join(map(str, sys.version_info[:2]))
    # Not of sys.path: Ray puts packages of its own there.
    folder = sysconfig.get_path("purelib")
    installed = {
        canonicalize_name(each.metadata["Name"]): each.version
        for each in importlib.metadata.distributions(path=[folder])
    }
    different = {
        name: f"{installed.get(name)}, locked {version}"
        for name, version in locked(here).items()
        if installed.get(name) != version
    }
    assert different == {}, "make setup installs what is locked"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_lock_is_what_the_resolver_finds(tmp_path: Path) -> None:
    """Resolved again from what is locked: nothing has to change."""
    from repo.test_cuda_set import NO_NETWORK, UV

    copy = tmp_path / "project"
    for path in (LOCK, OVERRIDES, ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE"):
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    shutil.copytree(ROOT / "scripts", copy / "scripts")
    shutil.copytree(OVERRIDES.parent, copy / OVERRIDES.parent.relative_to(ROOT), dirs_exist_ok=True)
    done = subprocess.run(
        [copy / "scripts/lock_packages.sh", Path(UV).parent.parent],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode and NO_NETWORK.search(done.stderr):
        pytest.skip(f"no network: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    assert (copy / LOCK.name).read_text() == LOCK.read_text()
