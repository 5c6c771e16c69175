"""A run's recorder: files by phase and step, and nothing of it ends a run."""

from __future__ import annotations

import errno
import logging
import threading
from pathlib import Path

import pytest

from agl_fast import Call, Rollout
from agl_fast.recording import RecordingWriter, RunRecorder, read_recording


def rollout(name: str) -> Rollout:
    return Rollout(name, "g", [Call([1, 2], [3])], 1.0)


def files(recorder: RunRecorder) -> dict[str, list[str]]:
    return {
        path.name: [each.rollout_id for each in read_recording(path).rollouts]
        for path in sorted(recorder.folder.iterdir())
    }


def test_a_file_for_each_step_and_validation(tmp_path):
    recorder = RunRecorder(tmp_path, {"model": "m"})
    recorder.record(rollout("v"), 0, is_train=False)
    for step, name in enumerate("abb"):
        recorder.record(rollout(f"{name}{step}"), min(step, 1), is_train=True)
    recorder.close()
    recorder.close()
    assert files(recorder) == {
        "train-000001.jsonl.gz": ["a0"],
        "train-000002.jsonl.gz": ["b1", "b2"],
        "val-000000.jsonl.gz": ["v"],
    }
    about = read_recording(recorder.folder / "train-000002.jsonl.gz").about
    assert about == {"phase": "train", "step": 2, "policy_version": 1, "model": "m"}
    assert recorder.counts == {"written": 4, "lost": 0}


def test_calls_are_written_as_they_were_handed_over(tmp_path):
    recorder = RunRecorder(tmp_path)
    one = rollout("a")
    recorder.record(one, 0, is_train=True)
    one.calls[0].credit = 7.0
    one.calls.clear()
    recorder.close()
    (path,) = recorder.folder.iterdir()
    assert [call.credit for call in read_recording(path).rollouts[0].calls] == [1.0]


def test_a_full_disk_is_a_warning_once(tmp_path, monkeypatch, caplog):
    full = threading.Event()
    append = RecordingWriter._append

    def failing(self, value):
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, value)

    monkeypatch.setattr(RecordingWriter, "_append", failing)
    recorder = RunRecorder(tmp_path)
    with caplog.at_level(logging.WARNING):
        recorder.record(rollout("a"), 0, is_train=True)
        wait_for(recorder, 1)
        full.set()
        for name in "bc":
            recorder.record(rollout(name), 0, is_train=True)
        recorder.record(rollout("v"), 1, is_train=False)
        wait_for(recorder, 4)
        full.clear()
        recorder.record(rollout("d"), 1, is_train=True)
        recorder.close()
    assert recorder.counts == {"written": 2, "lost": 3}
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.text
    assert files(recorder) == {"train-000001.jsonl.gz": ["a"], "train-000002.jsonl.gz": ["d"]}


def test_a_line_that_does_not_fit_is_taken_back(tmp_path):
    """As with a disk that fills up in the middle of a line."""
    path = tmp_path / "r.jsonl"
    with RecordingWriter(path) as writer:
        writer.write(rollout("a"))
        writer._file = HalfFull(writer._file)
        with pytest.raises(OSError, match="No space left"):
            writer.write(rollout("b"))
        writer._file = writer._file.file
        writer.write(rollout("c"))
    assert [each.rollout_id for each in read_recording(path).rollouts] == ["a", "c"]


class HalfFull:
    def __init__(self, file):
        self.file = file
        self.has_written = False

    def write(self, line):
        if self.has_written:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.has_written = True
        return self.file.write(line[:10])

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_a_rollout_that_cannot_be_written_is_counted(tmp_path, caplog):
    recorder = RunRecorder(tmp_path)
    recorder.record(Rollout("a", "g", [Call(["x"], [1])]), 0, is_train=True)
    recorder.record(rollout("b"), 0, is_train=True)
    recorder.close()
    assert recorder.counts == {"written": 1, "lost": 1}
    assert "prompt_ids must be a sequence of int" in caplog.text


def test_what_waits_is_bounded(tmp_path, monkeypatch, caplog):
    goes_on = threading.Event()
    append = RecordingWriter._append
    monkeypatch.setattr(
        RecordingWriter, "_append", lambda self, value: goes_on.wait(20) and append(self, value)
    )
    recorder = RunRecorder(tmp_path, max_waiting_tokens=7)
    for name in "abcd":
        recorder.record(rollout(name), 0, is_train=True)
    goes_on.set()
    recorder.close()
    assert recorder.counts["lost"] >= 1
    assert recorder.counts["written"] + recorder.counts["lost"] == 4
    assert "tokens wait for the disk already" in caplog.text


def test_nothing_is_made_where_nothing_is_recorded(tmp_path):
    recorder = RunRecorder(tmp_path / "records")
    recorder.close()
    assert list(tmp_path.iterdir()) == []


def test_after_the_end(tmp_path):
    recorder = RunRecorder(tmp_path)
    recorder.close()
    recorder.record(rollout("a"), 0, is_train=True)
    assert recorder.counts == {"written": 0, "lost": 1}


def wait_for(recorder: RunRecorder, n: int) -> None:
    pause = threading.Event()
    for _ in range(2000):
        if sum(recorder.counts.values()) >= n:
            return
        pause.wait(0.01)
    raise AssertionError(f"{recorder.counts} after a long wait")


def test_folder_of_each_run(tmp_path):
    recorder = RunRecorder(Path(tmp_path))
    assert recorder.folder.parent == tmp_path
    recorder.close()
