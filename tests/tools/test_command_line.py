"""`python -m agl_fast`: what is wrong with a command line is one line, at once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import agl_fast
from agl_fast.__main__ import COMMANDS, main
from agl_fast.commands.train import DESCRIPTION

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

HEAVY = {"torch", "verl", "ray", "vllm", "transformers", "agentlightning", "litellm"}
# Every command's --help, and what needs no more than the names of files and commands.
AT_ONCE = [
    *([name, "--help"] for name in COMMANDS),
    ["--version"],
    ["--help"],
    ["trian"],
    ["analyse", "FILE"],
    ["join", "nowhere.py"],
    ["replay", "nowhere.jsonl"],
    ["analyze", "nowhere.jsonl"],
    ["train", "no_value"],
    ["data.train_files=x.jsonl", "--help"],
]


def run_in_one_process(lines: list[list[str]]) -> tuple[list[int], set[str], list[str]]:
    """Exit statuses, heavy modules that were loaded, and the lines on stderr."""
    code = (
        "import json, sys\n"
        "from agl_fast.__main__ import main\n"
        "statuses = []\n"
        f"for line in {lines!r}:\n"
        "    print(line, file=sys.stderr)\n"
        "    try: statuses.append(main(line))\n"
        "    except SystemExit as ended: statuses.append(ended.code)\n"
        f"print(); print(json.dumps([statuses, sorted({HEAVY!r} & set(sys.modules))]))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    statuses, loaded = json.loads(ended.stdout.splitlines()[-1])
    return statuses, set(loaded), ended.stderr.splitlines()


def test_help_and_mistakes_load_nothing_heavy():
    statuses, loaded, _ = run_in_one_process(AT_ONCE)
    wrong = {"trian", "analyse", "nowhere.py", "nowhere.jsonl", "no_value"}
    assert statuses == [2 if wrong & {*line} else 0 for line in AT_ONCE]
    assert loaded == set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "agl_fast: unknown command 'trian'; did you mean train?"),
        (["analyse", "FILE"], "agl_fast: unknown command 'analyse'; did you mean analyze?"),
        (["Replay"], "agl_fast: unknown command 'Replay'; did you mean replay?"),
        (["exprot", "a", "b"], "agl_fast: unknown command 'exprot'; did you mean export?"),
        (["doctr"], "agl_fast: unknown command 'doctr'; did you mean doctor?"),
        (["xyz"], f"agl_fast: unknown command 'xyz'; expected {', '.join(COMMANDS)}, or key=value"),
        (
            ["--verison"],
            "agl_fast: unknown option --verison; python -m agl_fast --help lists commands",
        ),
        (["train", "data"], "agl_fast train: 'data': expected key=value"),
        (["data.n=1", "trainer.nnodes"], "agl_fast train: 'trainer.nnodes': expected key=value"),
        (["train", "a=1", "--epochs"], "agl_fast train: unrecognized arguments: --epochs"),
        (["replay", "FILE", "--fast"], "agl_fast replay: unrecognized arguments: --fast"),
        (["doctor", "now"], "agl_fast doctor: unrecognized arguments: now"),
        (["export"], "agl_fast export: the following arguments are required: CKPT, OUT"),
        (["join", "no.py"], "agl_fast join: no.py: expected a Python script, there is none"),
        (
            ["dry-run", "no.py:agent", "tasks.jsonl", "URL"],
            "agl_fast dry-run: no.py: expected a file, there is none",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.err == f"{message}\n"
    assert captured.out == ""


def test_version_and_usage(capsys):
    assert main(["--version"]) == main(["-V"]) == 0
    assert capsys.readouterr().out == f"agl_fast {agl_fast.__version__}\n" * 2
    assert main([]) == 0
    usage = capsys.readouterr().out
    assert help_of(["-h"], capsys) == help_of(["--help"], capsys) == usage
    for name in COMMANDS:
        assert re.search(rf"^ +{name} +\w", usage, re.MULTILINE), name


def help_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_every_command_has_a_help_of_its_own(capsys):
    for name in COMMANDS:
        assert help_of([name, "--help"], capsys).startswith("usage: python -m agl_fast")
    for arguments in (["train", "--help"], ["train", "-h"], ["data.train_files=x.jsonl", "--help"]):
        assert DESCRIPTION in help_of(arguments, capsys)


def test_settings_of_replay_stand_before_and_after_options(files, capsys):
    for arguments in (["a.b=1", "--seed", "2"], ["--seed", "2", "a.b=1"]):
        assert "missing.jsonl" in refused(["replay", "missing.jsonl", *arguments], capsys)


@pytest.mark.filterwarnings("ignore")  # of verl and what it imports
def test_the_help_of_train_names_keys_with_their_defaults():
    pytest.importorskip("verl", reason="needs the extra [cpu] or [verl]")
    from agl_fast.verl.config.composition import _resolved_defaults
    from agl_fast.verl.config.user_settings import leaves

    defaults = dict(leaves(_resolved_defaults()))
    shown = dict(re.findall(r"^  ([a-z_.]+)=(\S+)", DESCRIPTION, re.MULTILINE))
    assert len(shown) == 15
    shown.pop("key")
    for key, value in shown.items():
        is_null = defaults[key] is None or key == "data.val_files"  # verl's names an example of its
        if value != "…":
            assert value == ("null" if is_null else str(defaults[key])), key


FILES = {
    "empty.jsonl": b"",
    "text.jsonl": b"hello\n",
    "cut.jsonl": b'{"a": 1',
    "list.jsonl": b"[1]\n",
    "other.jsonl": b'{"recording": "other"}\n',
    "deep.jsonl": b"[" * 100_000,
    "binary.jsonl": bytes(range(256)),
    "damaged.jsonl.gz": b"\x1f\x8b damaged",
    "config.json": b"{",
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith(f"agl_fast {arguments[0]}: ")
    return line


@pytest.mark.parametrize("command", ["analyze", "replay"])
@pytest.mark.parametrize("name", [*FILES, "folder", "missing.jsonl"])
def test_a_file_that_is_no_recording_is_one_line(command, name, files, capsys):
    assert name in refused([command, name], capsys)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("missing", "missing: No such file or directory"),
        ("folder", "folder/config.json: No such file or directory"),
        ("config.json", "config.json: not JSON"),
        ("deep.jsonl", "deep.jsonl: not JSON"),
    ],
)
def test_a_model_that_is_none_is_one_line(model, message, files, capsys):
    assert message in refused(["analyze", "empty.jsonl", "--model", model], capsys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--micro-batch-tokens", "0"], "micro_batch_tokens must be at least 1, got 0"),
        (["--model", "config.json", "--tflops", "nan"], "tflops must be more than 0"),
        (["--store", "http://127.0.0.1:9"], "http://127.0.0.1:9"),
    ],
)
def test_an_option_that_cannot_be_is_one_line(options, message, files, capsys):
    if "--store" in options:
        pytest.importorskip("agentlightning", reason="needs the extra [cpu] or [verl]")
        assert message in refused(["analyze", *options], capsys)
    else:
        assert message in refused(["analyze", "empty.jsonl", *options], capsys)


@pytest.mark.filterwarnings("ignore")  # of verl and what it imports
def test_a_checkpoint_that_is_none_is_one_line(files, capsys):
    pytest.importorskip("verl", reason="needs the extra [cpu] or [verl]")
    for name in ("missing", "folder"):
        assert "expected a checkpoint of verl's FSDP actor" in refused(
            ["export", name, "out"], capsys
        )


@pytest.mark.filterwarnings("ignore")  # of verl and what it imports
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.n=1,2"], "'data.n=1,2': expected key=value with one value"),
        (["~data.train_files"], "expected key=value with one value"),
        (["data.train_batch_size=nothing"], "data.train_batch_size='nothing': expected int"),
    ],
)
def test_settings_that_cannot_be_are_one_line(settings, message, capsys):
    pytest.importorskip("verl", reason="needs the extra [cpu] or [verl]")
    with pytest.raises(SystemExit) as ended:
        main(settings)
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.match("agl_fast train: .*" + re.escape(message), last)
