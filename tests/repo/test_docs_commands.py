"""Every command of the documentation: its settings compose, its options and targets exist."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import agl_fast
from agl_fast.__main__ import COMMANDS, main
from agl_fast.recording import RecordingWriter
from support.model_configs import SMALL
from support.paths import ROOT

PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name for name in ("README.md", "examples/README.md", "benchmarks/README.md")),
]
# Programs that are not this project's.
OTHERS = {"cd", "docker", "export", "git", "nvidia-smi", "pip", "ray", "source", "uv", "vllm"}
OURS = {"agl_fast", "examples", "benchmarks", "pytest"}
# What a command of the documentation begins with; other code in a line of text is none.
INLINE = re.compile(r"`((?:[A-Z_]+=\S+ )*(?:(?:\.venv/bin/)?python -m |make |pytest )[^`]+)`")
# Environment variables that commands are given, by what reads them.
VARIABLES = {"MODEL", "DEVICE", "LEVEL", "AGL_CUDA", "CUDA_VISIBLE_DEVICES"}
VARIABLES |= {"AGL_CURRENT_ROLE", "AGL_SERVER_HOST", "AGL_SERVER_PORT"}


def blocks(text: str) -> Iterator[str]:
    """Lines of every ```bash block, with those that go on joined."""
    for block in re.findall(r"^ *```(?:bash|console|sh)\n(.*?)^ *```", text, re.S | re.M):
        yield from block.replace("\\\n", " ").splitlines()


def commands(page: Path) -> list[str]:
    text = page.read_text()
    lines = [*blocks(text), *(each.replace("\n", " ") for each in INLINE.findall(text))]
    found = []
    for line in lines:
        bare = re.sub(r"(^|\s)#.*", "", line).strip().removeprefix("$ ")
        found += [each.strip() for each in re.split(r"&&|;|\|", bare) if each.strip()]
    return list(dict.fromkeys(found))


ALL = [(page, command) for page in PAGES for command in commands(page)]


def words_of(command: str) -> list[str]:
    """Without the environment variables before it, each of which something reads."""
    words = shlex.split(command)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name = words.pop(0).partition("=")[0]
        assert name in VARIABLES, f"{command}: nothing reads {name}"
    if words and "/bin/" in words[0]:  # of a virtual environment
        words[0] = Path(words[0]).name
    return words


def test_commands_are_found():
    found = [command for _, command in ALL]
    assert "make quickstart LEVEL=tree" in found
    assert any(each.startswith("python -m agl_fast algorithm.adv_estimator=grpo") for each in found)
    assert len(found) > 40


@pytest.mark.filterwarnings("ignore")  # of verl and what it imports
@pytest.mark.parametrize(
    ("page", "command"),
    [pytest.param(page, each, id=f"{page.relative_to(ROOT)}: {each[:60]}") for page, each in ALL],
)
def test_a_command_of_the_documentation(page, command, tmp_path, monkeypatch, capsys):
    words = words_of(command)
    if not words or words[0] in OTHERS:
        return
    program, *arguments = words
    if program == "make":
        assert set(targets_of(arguments)) <= make_targets()
    elif program == "pytest":
        require_options_of("pytest", arguments)
    elif program == "python" and arguments[:1] == ["-m"]:
        module, *options = arguments[1:]
        if module == "agl_fast":
            monkeypatch.chdir(tmp_path)  # what the command writes stays there
            require_command(options, capsys)
        elif module.partition(".")[0] in OURS:
            require_options_of(module, options)
    elif program == "python":
        assert [each for each in arguments if each.endswith(".py")], command
    else:
        raise AssertionError(f"{command}: {program} is neither ours nor in OTHERS")


def targets_of(arguments: list[str]) -> Iterator[str]:
    for argument in arguments:
        if "=" not in argument:
            yield argument


@cache
def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def require_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Its settings compose; or its options are read, and then its file is missing."""
    arguments = [each for each in arguments if each != "…"]
    if arguments == ["key=value"] or arguments[:1] == ["COMMAND"]:
        return
    if "=" in arguments[0]:
        require_settings(arguments)
        return
    name, *rest = arguments
    if name == "--version":
        assert main(arguments) == 0
        return
    assert name in COMMANDS
    if not rest:  # named in a text
        return
    if name in ("analyze", "replay") and "--store" not in rest:
        rest = with_files(name, rest)
        assert main([name, *rest]) == 0
        return
    with pytest.raises(SystemExit) as ended:
        main([name, *(each.replace("4747", "9") for each in rest)])  # nothing listens there
    said = capsys.readouterr().err
    assert ended.value.code == 2
    # The command has these options: what it refuses is a file or an address.
    wrong_options = "unrecognized arguments|invalid |expected one argument|arguments are required"
    assert not re.search(wrong_options, said), said


def with_files(command: str, arguments: list[str]) -> list[str]:
    """The arguments, with a recording and a model's configuration where they name some."""
    found = list(arguments)
    if "--tokenizer" in found:  # a folder of one is in test_analyze
        at = found.index("--tokenizer")
        del found[at : at + 2]
    if "--model" in found:
        at = found.index("--model")
        if command == "replay":  # the step, which wants weights, is in test_replay
            del found[at : at + 2]
        else:
            found[at + 1] = "model"
            Path("model").mkdir()
            Path("model/config.json").write_text(json.dumps(SMALL))
    calls = [agl_fast.Call([1, 2], [3, 4]), agl_fast.Call([1, 2, 3, 4, 5], [6])]
    with RecordingWriter("recording.jsonl") as writer:
        writer.write(agl_fast.Rollout("r", "g", calls, 1.0))
    return ["recording.jsonl", *found[1:]]


def require_settings(arguments: list[str]) -> None:
    pytest.importorskip("verl", reason="needs the extra [cpu] or [verl]")
    from agl_fast.commands.overrides import parse_overrides
    from agl_fast.verl.config import compose

    for device in ("cpu", "cuda"):
        assert compose(parse_overrides(arguments), device=device).config.critic.enable is False


def require_options_of(module: str, options: list[str]) -> None:
    assert importlib.util.find_spec(module) is not None, f"there is no module {module}"
    for each in options:
        assert not each.startswith("tests/") or (ROOT / each).exists(), f"there is no {each}"
    names = [each.partition("=")[0] for each in options if each.startswith("-")]
    if names:
        shown = help_of(module)
        assert [name for name in names if not re.search(rf"{name}\b", shown)] == []


@cache
def help_of(module: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", module, "--help"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
    )
    return ended.stdout
