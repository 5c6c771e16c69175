"""Facts of the distribution that stand in more than one file are the same in all of them."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import entry_points, metadata

import pytest

import agl_fast
from agl_fast import doctor
from agl_fast.__main__ import main
from support.paths import ROOT

PROJECT = (ROOT / "pyproject.toml").read_text()


def project_value(key: str) -> str:
    (found,) = re.findall(rf'^{key} = "(.*?)"', PROJECT, re.MULTILINE)
    assert isinstance(found, str)
    return found


def test_the_version_is_that_of_pyproject() -> None:
    expected = project_value("version")
    assert agl_fast.__version__ == expected, "make setup installs what pyproject.toml says"
    assert re.search(
        rf"^version: {re.escape(expected)}$", (ROOT / "CITATION.cff").read_text(), re.M
    )
    (release, state), *_ = re.findall(
        r"^## (\S+) - (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert expected == (f"{release}.dev0" if state == "unreleased" else release)


def test_metadata_names_authors_and_urls() -> None:
    found = metadata("agl-fast")
    assert found["Author"] == "agl_fast contributors"
    assert found["License-Expression"] == "Apache-2.0"
    assert found.get_all("Project-URL")
    assert found["Keywords"]


def test_the_command_is_the_module() -> None:
    (command,) = entry_points(group="console_scripts", name="agl-fast")
    assert command.load() is main


@pytest.mark.parametrize("name", ["doctor", "quickstart"])
def test_a_command_is_a_module_too(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", f"agl_fast.{name}", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.split() == shown.stdout.split()


def test_supported_pythons_are_the_same_everywhere() -> None:
    classified = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    assert project_value("requires-python") == f">={classified[0]}"
    wheels = re.search(
        r"^VERSIONS = \((.*)\)$", (ROOT / "scripts/build_wheels.py").read_text(), re.M
    )
    assert wheels is not None
    assert re.findall(r'"(.*?)"', wheels[1]) == classified
    create = (ROOT / "scripts/create_venv.sh").read_text()
    low, high = (".".join(map(str, bound)) for bound in doctor.PYTHONS)
    assert f"({low.replace('.', ', ')}) <= " in create
    assert f" <= ({high.replace('.', ', ')})" in create
    assert low == classified[0]
    assert high in classified
    assert f"find_package(Python {low} " in (ROOT / "CMakeLists.txt").read_text()


def test_pre_commit_has_the_tools_of_the_extra_dev() -> None:
    yaml = pytest.importorskip("yaml")
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    tools = {hook["id"]: hook["additional_dependencies"] for hook in repository["hooks"]}
    assert {name: len(found) for name, found in tools.items()} == {
        "ruff-check": 1,
        "ruff-format": 1,
        "clang-format": 1,
    }
    (extra,) = re.findall(r"^dev = \[\n(.*?)^\]", PROJECT, re.DOTALL | re.MULTILINE)
    pins = re.findall(r'"(.*?)"', extra)
    for name, (requirement,) in tools.items():
        assert requirement in pins, name


@pytest.mark.parametrize(
    "path", ["Makefile", *sorted(p.name for p in (ROOT / "scripts").glob("*.*"))]
)
def test_files_that_targets_name_exist(path: str) -> None:
    text = (ROOT / path if path == "Makefile" else ROOT / "scripts" / path).read_text()
    named = re.findall(r"(?:tests|scripts|csrc|python|docs)/[\w/.-]+\.(?:py|sh|cpp|txt|toml)", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
