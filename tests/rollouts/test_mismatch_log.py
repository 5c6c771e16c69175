"""The three logs of calls that extended no other one: named as in 0.3, readable, bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agentlightning", reason="needs the extra [cpu] or [verl]")

import agl_fast
from agl_fast.rollouts import mismatch_log
from agl_fast.rollouts.mismatch_log import CASES_A_STEP, LOG_BYTES, MismatchLog
from support.daemon_runs import AgentModeDaemon  # noqa: F401 (imported without noise)
from support.simulated_agents import Tokenizer


def broken(name: str, prompt: list[int]) -> agl_fast.Rollout:
    calls = [agl_fast.Call([5, 6, 7], [0, 0, 8]), agl_fast.Call(prompt, [9])]
    return agl_fast.Rollout(name, "g", calls, 1.0)


def write(folder: Path, rollouts: list[agl_fast.Rollout], *, tokenizer: Any = None) -> None:
    batch = agl_fast.build_batch(
        rollouts,
        max_prompt_length=16,
        max_response_length=16,
        pad_token_id=0,
        tokenizer=tokenizer,
    )
    MismatchLog(str(folder), tokenizer).write(batch.mismatches, rollouts, step=12)


def test_each_kind_in_its_log(tmp_path):
    write(
        tmp_path / "logs",
        [
            broken("template", [5, 6, 7, 0, 1, 8]),
            broken("retoken", [5, 6, 7, 4, 8]),  # "aa" in one token
            broken("shortened", [5, 6, 7]),
            broken("new", [5, 9]),
        ],
        tokenizer=Tokenizer(),
    )
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert sorted(logs) == ["others_mismatch.log", "retoken_mismatch.log", "template_mismatch.log"]
    assert logs["retoken_mismatch.log"].split("\n") == [
        "----- step 12, rollout retoken, call 1: retokenised at token 3 of 5, after call 0",
        'before   "aé"',
        'expected "aaé"',
        "         [0, 0, 8]",
        'found    "aaé"',
        "         [4, 8]",
        "",
        "",
    ]
    assert "rollout template, call 1: history_rewritten" in logs["template_mismatch.log"]
    assert "rollout shortened, call 1: shortened" in logs["others_mismatch.log"]
    assert "rollout new, call 1: new_conversation" in logs["others_mismatch.log"]


def test_the_first_of_a_step(tmp_path):
    write(tmp_path, [broken(f"r{i}", [5, 6, 7, 0, 1, 8]) for i in range(CASES_A_STEP + 3)])
    (log,) = tmp_path.iterdir()
    text = log.read_text()
    assert text.count("-----") == CASES_A_STEP
    assert text.endswith("3 further cases of this step are not shown.\n\n")


def test_a_log_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(mismatch_log, "LOG_BYTES", 300)
    for _ in range(5):
        write(tmp_path, [broken(f"r{i}", [5, 6, 7, 0, 1, 8]) for i in range(4)])
    (log,) = tmp_path.iterdir()
    text = log.read_text()
    assert text.endswith("The log is full: further cases are only counted.\n")
    assert len(text) < 600 < LOG_BYTES
    assert text.count("full") == 1


def test_no_folder_for_nothing(tmp_path):
    write(tmp_path / "logs", [broken("r", [5, 6, 7, 0, 0, 8])])
    assert list(tmp_path.iterdir()) == []


def test_a_rollout_id_and_a_text_stay_on_their_lines(tmp_path):
    class Hostile(Tokenizer):
        def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
            return "\x1b[2J\x7f\x9b\u2028\n----- step 1, rollout forged"

    write(
        tmp_path,
        [broken("ro\n----- step 1, rollout forged\x1b[2J", [5, 6, 7, 0, 1, 8])],
        tokenizer=Hostile(),
    )
    (log,) = tmp_path.iterdir()
    text = log.read_text()
    assert not set("\x1b\x7f\x9b\u2028") & set(text)
    starts = [line for line in text.split("\n") if line.startswith("-----")]
    assert len(starts) == 1
    assert r"rollout ro\n----- step 1, rollout forged\x1b[2J, call 1" in starts[0]


def test_only_the_owner_reads_a_log(tmp_path):
    write(tmp_path / "logs", [broken("a", [5, 6, 7, 0, 1, 8])])
    assert (tmp_path / "logs").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "logs" / "template_mismatch.log").stat().st_mode & 0o777 == 0o600
