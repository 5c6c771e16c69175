"""What the quickstart tells of its run."""

from __future__ import annotations

import base64
import re
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("matplotlib", reason="needs the extra [cpu]")

from PIL import Image

import agl_fast
from agl_fast.printable import table
from agl_fast.quickstart.__main__ import most_improved
from agl_fast.quickstart.report import (
    Piece,
    chart,
    explain_row_counts,
    marked,
    pieces_of,
    table_of,
    write_report,
)
from agl_fast.quickstart.run_log import LEVELS, Played, RunLog, forwarded
from agl_fast.recording import RunRecorder
from agl_fast.tools.analyze import analyze, read_traces

# The second call extends the first, the third begins anew.
CALLS = [
    agl_fast.Call([1, 2], [3, 4]),
    agl_fast.Call([1, 2, 3, 4, 5], [6]),
    agl_fast.Call([9], [8]),
]
ROLLOUTS = [agl_fast.Rollout("r", "d", CALLS, 1.0)]


class Tokenizer:
    def decode(self, ids: list[int]) -> str:
        return "".join(f"<{token}>" for token in ids)


@pytest.fixture
def log():
    lines = []
    log = RunLog(lines.append, steps=2)
    log.validated(0, 0.25)
    log.sampled(ROLLOUTS, 0.5)
    log.sampled(ROLLOUTS, 1.0)
    log.validated(2, 0.875)
    log.seconds = {"training": 61.25, "end": 2.0}
    assert lines[-2] == "  [####################] step 2/2, training reward 1.000"
    return log


def test_forwarded_counts_calls_chains_or_trees():
    assert forwarded(ROLLOUTS, "transition") == (3, 4 + 6 + 2)
    assert forwarded(ROLLOUTS, "trajectory") == (2, 6 + 2)
    assert forwarded(ROLLOUTS, "tree") == (1, 6 + 2)


LIMITS = {"level": "trajectory", "max_prompt_length": 8, "max_response_length": 9}


@pytest.mark.parametrize("n_failing", [0, 1])
def test_analyze_counts_the_rows_of_the_table(tmp_path, n_failing):
    """Of a run's recordings; the limits of its rows are counted apart."""
    pytest.importorskip("verl", reason="needs the extra [cpu]")
    from agl_fast.quickstart.training import reporting_to
    from support.daemon_runs import daemon_bench

    def talk(run) -> float:
        number = int(run.input["question"][1])
        run.ask("hi")
        run.ask("hi", "hello", "and?" * number)
        if number < n_failing:
            raise RuntimeError("the agent failed")
        run.ask("something else")
        return 1.0

    log = RunLog(print, steps=2)
    _, daemon_cls = reporting_to(log)
    recorder = RunRecorder(tmp_path, {"rows": LIMITS})
    with daemon_bench(run_recorder=recorder, daemon_cls=daemon_cls) as bench:
        for step in (1, 2):
            bench.daemon.policy_version = step - 1
            bench.run(talk, 3)
            bench.daemon.get_train_data_batch(8, 9, "cpu", step)
    traces = read_traces(sorted(recorder.folder.iterdir()))
    found = analyze(traces)
    n_failed = 2 * 2 * n_failing  # of two steps, by two rollouts of each sample
    assert (found.rollouts, log.left_out) == (12, n_failed)
    counted = found.layouts_without_limits
    if n_failing:
        assert found.statuses == {"succeeded": 8, "failed": 4}
        failed = [each for each in traces.rollouts if each.status == "failed"]
        for level in LEVELS:
            rows, tokens = forwarded(failed, level)
            assert (counted[level].rows - rows, counted[level].tokens - tokens) == (
                log.forwarded[level].rows,
                log.forwarded[level].tokens,
            )
    else:
        assert {level: (each.rows, each.tokens) for level, each in counted.items()} == {
            level: (each.rows, each.tokens) for level, each in log.forwarded.items()
        }
    assert log.forwarded["transition"].rows == 3 * (12 - n_failed)
    # With the recorded limits, chains are cut: the other number that analyze shows.
    assert found.layouts["trajectory"].tokens < counted["trajectory"].tokens
    said = explain_row_counts(log, tmp_path)
    assert f"analyze {tmp_path}/recordings/*/train-*.jsonl.gz" in said
    assert (f"They exclude {n_failed} rollouts that failed or made no call" in said) is bool(
        n_failing
    )


def test_table_sums_the_steps(log):
    assert table_of(log, 1.5)[1:] == [
        ("validation reward", "0.250", "0.875"),
        ("", "rows", "tokens"),
        ("forwarded at level transition", "6", "24"),
        ("forwarded at level trajectory", "4", "16"),
        ("forwarded at level tree", "2", "16"),
        ("", "", "seconds"),
        ("training", "", "61.2"),
        ("end", "", "2.0"),
        ("", "", "GiB"),
        ("peak memory", "", "1.5"),
    ]
    assert len(table(table_of(log, 1.5)).splitlines()) == 11


def test_table_shows_what_an_update_takes_where_it_was_measured(log):
    log.update_seconds = {"transition": 3.0, "trajectory": 2.5, "tree": 1.25}
    assert table_of(log, 1.5)[6:11] == [
        ("update of the first step", "", "seconds"),
        ("at level transition", "", "3.00"),
        ("at level trajectory", "", "2.50"),
        ("at level tree", "", "1.25"),
        ("", "", "seconds"),
    ]


def test_stages_follow_each_other_and_add_up():
    log = RunLog(print, steps=1)
    for stage in ("model", "training", "validation", "training"):
        log.stage_ended(stage)
    assert list(log.seconds) == ["model", "training", "validation"]
    assert min(log.seconds.values()) >= 0.0


def test_peak_memory_is_how_far_the_available_memory_fell(monkeypatch):
    pytest.importorskip("verl", reason="needs the extra [cpu]")
    from agl_fast.quickstart import training

    available = iter([8.0, 6.5, 3.0, 7.0])

    exhausted = threading.Event()

    def look() -> SimpleNamespace:
        now = next(available, None)
        if now is None:
            exhausted.set()
        return SimpleNamespace(available=(now or 8.0) * 2**30)

    monkeypatch.setattr("psutil.virtual_memory", look)
    monkeypatch.setattr(training, "MEMORY_POLL_SECONDS", 0.001)
    with training.PeakMemory() as peak:
        assert exhausted.wait(60), "nobody looked"
    assert peak.gib == 5.0


def test_pieces_are_the_rows_at_level_trajectory():
    rows = pieces_of(Played({}, CALLS, 1.0), Tokenizer())
    assert rows == [
        [Piece("<1><2>", False), Piece("<3><4>", True), Piece("<5>", False), Piece("<6>", True)],
        [Piece("<9>", False), Piece("<8>", True)],
    ]
    assert marked(rows).startswith("<1><2>«<3><4>»<5>«<6>»\n")


def test_pieces_of_a_tree_are_its_branches():
    calls = [agl_fast.Call([1, 2], [3, 4]), agl_fast.Call([1, 2, 4, 5], [6])]
    assert pieces_of(Played({}, calls, 1.0), Tokenizer(), "tree") == [
        [Piece("<1><2>", False), Piece("<3><4>", True)],
        [Piece("<4><5>", False), Piece("<6>", True)],
    ]


def test_the_rollout_that_is_shown_is_one_that_improved():
    before = [Played({}, CALLS, reward) for reward in (1.0, 0.0, 0.0)]
    after = [Played({}, CALLS, reward) for reward in (1.0, 0.0, 1.0)]
    assert most_improved(before, after) == (before[2], after[2])


def test_report_needs_no_other_file(log, tmp_path):
    rows = pieces_of(Played({}, CALLS, 1.0), Tokenizer())
    page, picture = write_report(tmp_path, log, {"Before": rows}, 1.5)
    text = page.read_text(encoding="utf-8")
    assert '<span class="trained">&lt;3&gt;&lt;4&gt;</span>' in text
    assert "0.875" in text
    assert "href=" not in text
    (source,) = re.findall('src="([^"]*)"', text)
    head, _, data = source.partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(data) == picture.read_bytes()
    with Image.open(picture) as image:
        assert image.size == (720, 320)


def test_chart_has_the_rewards_of_all_steps_and_validations(log):
    (axes,) = chart(log).axes
    curves = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert curves == {
        "training reward": [[1, 0.5], [2, 1.0]],
        "validation reward": [[0, 0.25], [2, 0.875]],
    }


def test_text_of_a_tool_passes_for_nothing_else(log, tmp_path):
    """Neither for a mark, nor for another row, nor for a command of the terminal."""
    tool = "\x1b[2J\x9b31m«»\u202e\n--- another row ---\nok\t\r"
    shown = marked([[Piece(tool, False), Piece("a«b", True)], [Piece("c", False)]])
    assert shown.split("\n") == [
        r"\x1b[2J\x9b31m\xab\xbb\u202e",
        r"\--- another row ---",
        r"ok" + "\t" + r"\r«a\xabb»",
        "--- another row ---",
        "c",
    ]
    page, _ = write_report(tmp_path, log, {"played": [[Piece(tool, False)]]}, 1.0)
    text = page.read_text(encoding="utf-8")
    assert not set("\x1b\x9b\u202e\r") & set(text)
    assert r"\x1b[2J" in text
