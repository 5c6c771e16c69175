"""What a code host runs: the targets, files and Pythons that workflows name are there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROOT

yaml = pytest.importorskip("yaml")

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
VARIABLES = set(re.findall(r"^(?:export )?([A-Z_]+) \?=", MAKEFILE, re.MULTILINE))
# The only job that may do more than read: it publishes, with nothing of the sources around.
PUBLISHES = ("release.yml", "publish")


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def jobs() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path in WORKFLOWS:
        for name, job in load(path)["jobs"].items():
            yield path.name, name, job


def steps() -> Iterator[tuple[str, dict[str, Any]]]:
    for workflow, name, job in jobs():
        for step in job["steps"]:
            yield f"{workflow}: {name}", step


def classifiers() -> list[str]:
    return re.findall(
        r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text()
    )


def matrix_of(workflow: str, job: str) -> list[str]:
    found: list[str] = load(GITHUB / "workflows" / workflow)["jobs"][job]["strategy"]["matrix"][
        "python"
    ]
    return found


def test_there_are_workflows_for_changes_nights_and_tags() -> None:
    # YAML 1.1 reads the key `on` as true.
    triggers = {path.name: set(load(path)[True]) for path in WORKFLOWS}
    assert triggers == {
        "ci.yml": {"push", "pull_request"},
        "nightly.yml": {"schedule", "workflow_dispatch"},
        "release.yml": {"push"},
    }
    assert load(GITHUB / "workflows" / "release.yml")[True]["push"] == {"tags": ["v*"]}


def test_steps_run_make_targets_that_exist() -> None:
    targets = []
    for where, step in steps():
        if "run" not in step:
            continue
        if step["run"].startswith("test "):  # compares the tag with `make version`
            assert "$(make --silent version)" in step["run"]
            continue
        # Without GitHub's expressions, whose spaces are no words.
        program, *words = shlex.split(re.sub(r"\$\{\{.*?\}\}", "X", step["run"]))
        assert program == "make", f"{where}: {step['run']}"
        named = [word for word in words if "=" not in word]
        assert named, f"{where}: {step['run']}"
        assert set(named) <= TARGETS, f"{where}: {step['run']}"
        given = {word.partition("=")[0] for word in words if "=" in word}
        assert given <= VARIABLES, f"{where}: {step['run']}"
        targets += named
    expected = {"lint", "tidy", "fast-tests", "core-tests", "coverage", "sanitize", "docs"}
    assert expected | {"slow-tests", "dist", "resolve"} == set(targets)


def test_what_is_uploaded_is_what_the_targets_write() -> None:
    uploaded = {
        step["with"]["path"] for _, step in steps() if "upload-artifact" in step.get("uses", "")
    }
    assert uploaded == {"build/coverage.xml", "build/docs", "dist"}
    for path in uploaded:
        assert re.search(rf"[ :]{re.escape(path)}$", MAKEFILE, re.MULTILINE), path


def test_every_supported_python_is_tested() -> None:
    with_verl = matrix_of("ci.yml", "tests")
    without = matrix_of("ci.yml", "tests-without-verl")
    supported = re.search(
        r"\((\d), (\d+)\) <= .* <= \((\d), (\d+)\)", (ROOT / "scripts/create_venv.sh").read_text()
    )
    assert supported is not None
    first, last = int(supported[2]), int(supported[4])
    assert with_verl == [f"3.{minor}" for minor in range(first, last + 1)]
    assert sorted({*with_verl, *without}, key=lambda v: int(v[2:])) == classifiers()
    assert set(classifiers()) - set(with_verl) <= set(without)


def test_set_up_pythons_are_supported_and_used() -> None:
    for workflow, name, job in jobs():
        for step in job["steps"]:
            if "setup-python" not in step.get("uses", ""):
                continue
            (command,) = [
                each["run"] for each in job["steps"] if "BASE_PYTHON" in each.get("run", "")
            ]
            listed = str(step["with"]["python-version"]).split("\n")
            versions = [each.strip() for each in listed if each.strip()]
            used = re.findall(r"PYTHON=python(\$\{\{.*?\}\}|\S+)", command)
            assert set(used) <= set(versions), f"{workflow}: {name}"
            for version in versions:
                assert version in (*classifiers(), "${{ matrix.python }}"), f"{workflow}: {name}"


def test_jobs_end_and_have_no_more_rights_than_they_need() -> None:
    for path in WORKFLOWS:
        assert load(path)["permissions"] == {"contents": "read"}, path.name
        assert "secrets." not in path.read_text(), path.name
    for workflow, name, job in jobs():
        assert 0 < job["timeout-minutes"] <= 180, f"{workflow}: {name}"
        if (workflow, name) == PUBLISHES:
            assert job["permissions"] == {"id-token": "write"}
            assert job["environment"] == "pypi"
            assert not any("run" in step or "checkout" in step["uses"] for step in job["steps"])
        else:
            assert "permissions" not in job, f"{workflow}: {name}"


def test_jobs_wait_for_jobs_that_exist() -> None:
    for path in WORKFLOWS:
        named = load(path)["jobs"]
        for name, job in named.items():
            assert job.get("needs", name) in named, f"{path.name}: {name}"


def test_actions_are_pinned_by_major_version() -> None:
    versions: dict[str, set[str]] = {}
    for where, step in steps():
        if "uses" in step:
            action, _, version = step["uses"].partition("@")
            # The publisher's major versions are branches.
            assert re.fullmatch(r"v\d+|release/v\d+", version), f"{where}: {step['uses']}"
            versions.setdefault(action, set()).add(version)
            if action == "actions/checkout":
                assert step["with"] == {"persist-credentials": False}, where
    assert [action for action, found in versions.items() if len(found) > 1] == []


def test_issue_forms_ask_for_what_a_bug_needs() -> None:
    forms = GITHUB / "ISSUE_TEMPLATE"
    for path in sorted(forms.glob("*.yml")):
        if path.name == "config.yml":
            continue
        fields = load(path)["body"]
        ids = [field["id"] for field in fields if field["type"] != "markdown"]
        assert len(ids) == len(set(ids)) > 1, path.name
    bug = {field.get("id"): field for field in load(forms / "bug.yml")["body"]}
    for name in ("what", "doctor", "config"):
        assert bug[name]["validations"] == {"required": True}
    assert "agl-fast doctor" in bug["doctor"]["attributes"]["description"]
    assert "agl-fast replay" in bug["recording"]["attributes"]["description"]
    for path in re.findall(r"blob/main/([\w./-]+)", (forms / "bug.yml").read_text()):
        assert (ROOT / path).is_file(), path
