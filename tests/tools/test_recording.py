"""Recordings: what is written is what is read, and what is wrong is named."""

from __future__ import annotations

import gzip
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import agl_fast
from agl_fast.recording import RecordingError, RecordingWriter, read_recording
from support.paths import DATA
from support.plain_rollouts import Containers, PlainRollout, to_native
from support.same_rollouts import assert_same_rollouts
from support.simulated_agents import rollouts_in_containers
from support.token_traces import TRACES, trace

PROVENANCE = {
    "policy_version": st.none() | st.integers(0, 2**40),
    "sampling": st.none() | st.just({"temperature": 0.7, "stop": ["\n"]}),
    "agent": st.none() | st.text(),
    "credit": st.just(1.0) | st.floats(allow_nan=False, allow_infinity=False),
}
SAMPLES = st.none() | st.dictionaries(
    st.text(), st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.floats(0, 1))
)


def position_ids(n_tokens: int) -> st.SearchStrategy[np.ndarray]:
    return st.integers(1, 4).map(lambda n_dims: np.arange(n_dims * n_tokens).reshape(n_dims, -1))


def written(folder: Path, rollouts: list[agl_fast.Rollout], name: str = "r.jsonl") -> Path:
    path = folder / name
    with RecordingWriter(path, {"phase": "train"}) as writer:
        writer.write_many(rollouts)
    return path


@given(rollouts_in_containers(), st.sampled_from(["r.jsonl", "r.jsonl.gz"]), st.data())
def test_read_is_what_was_written(
    pairs: list[tuple[PlainRollout, Containers]], name: str, data: st.DataObject
) -> None:
    rollouts = [to_native(plain, held) for plain, held in pairs]
    for rollout in rollouts:
        rollout.sample = data.draw(SAMPLES)
        for call in rollout.calls:
            for field, values in PROVENANCE.items():
                setattr(call, field, data.draw(values))
            n_tokens = len(call.prompt_ids) + len(call.response_ids)
            call.position_ids = data.draw(st.none() | position_ids(n_tokens))
    with tempfile.TemporaryDirectory() as folder:
        recording = read_recording(written(Path(folder), rollouts, name))
    assert recording.about == {"phase": "train"}
    assert_same_rollouts(recording.rollouts, rollouts)


def test_numbers_that_json_does_not_know(tmp_path):
    call = agl_fast.Call([1], [2], [float("-inf")], float("inf"))
    rollouts = [
        agl_fast.Rollout("a", "g", [call], float("nan")),
        agl_fast.Rollout("b", "g", [], np.float32(0.5)),
        agl_fast.Rollout("c", "g", [], True),
    ]
    read = read_recording(written(tmp_path, rollouts)).rollouts
    assert math.isnan(read[0].reward)
    assert read[0].calls[0].reward == float("inf")
    assert read[0].calls[0].log_probs.tolist() == [float("-inf")]
    assert read[1].reward == 0.5
    assert read[2].reward is True


@pytest.mark.parametrize("name", TRACES)
def test_token_traces(name, tmp_path):
    """They are read as they are; a recording holds what calls repeat of each other once."""
    expected = [to_native(one) for one in trace(name)]
    path = DATA / f"{name}.jsonl.gz"
    recording = read_recording(path)
    assert recording.about == {}
    assert_same_rollouts(recording.rollouts, expected)
    again = written(tmp_path, recording.rollouts, "again.jsonl.gz")
    assert_same_rollouts(read_recording(again).rollouts, expected)
    n_tokens = sum(len(call.context) for one in trace(name) for call in one.calls)
    assert 15 * again.stat().st_size < 4 * n_tokens


def test_calls_of_several_agents_are_differences(tmp_path):
    """Each continues its own conversation, whichever call stands between."""
    first, second = list(range(100)), list(range(200, 300))
    calls = [
        agl_fast.Call(first, [1]),
        agl_fast.Call(second, [2]),
        agl_fast.Call([*first, 1, 7], [3]),
        agl_fast.Call([*second, 2, 8], [4]),
    ]
    path = written(tmp_path, [agl_fast.Rollout("r", "g", calls)])
    told = json.loads(path.read_text().splitlines()[1])["calls"]
    assert [(call.get("base"), call.get("keep")) for call in told] == [
        (None, None),
        (None, None),
        (0, 101),
        (1, 101),
    ]


def test_what_json_has_no_word_for_is_told(tmp_path):
    path = written(tmp_path, [agl_fast.Rollout("r", "g", [], sample={"image": {1}})])
    assert read_recording(path).rollouts[0].sample == {"image": "{1}"}


def test_a_recording_is_not_overwritten(tmp_path):
    path = written(tmp_path, [])
    with pytest.raises(FileExistsError):
        RecordingWriter(path)
    assert read_recording(path).rollouts == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (agl_fast.Call([1.5], [2]), "rollout 'r', call 0: prompt_ids must be a sequence of int"),
        (agl_fast.Call([1], [2**31]), "call 0: response_ids has ids that do not fit into int32"),
        (agl_fast.Call([1], [2], ["a"]), "call 0: log_probs must be a sequence of float"),
        (agl_fast.Call([1], [2], reward="1"), "call 0: reward must be a number, got '1'"),
    ],
)
def test_what_cannot_be_written_is_named_and_leaves_the_file(tmp_path, call, message):
    path = tmp_path / "r.jsonl"
    with RecordingWriter(path) as writer:
        with pytest.raises((TypeError, ValueError), match=message):
            writer.write(agl_fast.Rollout("r", "g", [call]))
        writer.write(agl_fast.Rollout("s", "g", []))
    assert [each.rollout_id for each in read_recording(path).rollouts] == ["s"]


HEADER = {"recording": "agl_fast", "version": 1, "agl_fast": "0.1.0", "about": {}}
GOOD = {"rollout_id": "r", "data_id": "g", "calls": [{"tail": "AQAAAA==", "response": "AgAAAA=="}]}


def rollout_with(**call: Any) -> dict[str, Any]:
    return {**GOOD, "calls": [{**GOOD["calls"][0], **call}]}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "the file is empty"),
        ([{**HEADER, "version": 2}], "line 1: version: expected 1, got 2"),
        ([{**HEADER, "recording": "x"}], "line 1: recording: expected 'agl_fast', got 'x'"),
        ([{"messages": []}], "line 1: recording: expected 'agl_fast', got None"),
        ([{**HEADER, "about": 1}], "line 1: about: expected an object"),
        ([HEADER, [1]], "line 2: expected an object, got a list"),
        ([HEADER, GOOD, GOOD], "line 3: rollout_id: 'r' stands in an earlier line"),
        ([HEADER, {**GOOD, "rewrad": 1}], "line 2: rewrad: no such field"),
        ([HEADER, {**GOOD, "reward": "1"}], "line 2: reward: expected a number, got '1'"),
        ([HEADER, {**GOOD, "data_id": 7}], "line 2: data_id: expected a string, got 7"),
        ([HEADER, {"rollout_id": "r", "calls": []}], "line 2: data_id: missing"),
        ([HEADER, rollout_with(tail="AQ==")], r"line 2: calls\[0\].tail: expected a multiple of 4"),
        ([HEADER, rollout_with(tail="?")], r"line 2: calls\[0\].tail: expected base64"),
        ([HEADER, rollout_with(log_probs=[1])], r"calls\[0\].log_probs: expected a string"),
        ([HEADER, rollout_with(base=0, keep=1)], r"calls\[0\].base: expected the index of an earl"),
        ([HEADER, rollout_with(base=0)], r"calls\[0\].base and calls\[0\].keep stand together"),
        ([HEADER, rollout_with(trainable=1)], r"calls\[0\].trainable: expected true or false"),
        ([HEADER, rollout_with(policy_version=True)], r"policy_version: expected a whole number"),
        (
            [
                HEADER,
                {**GOOD, "calls": GOOD["calls"] + [{**GOOD["calls"][0], "base": 0, "keep": 3}]},
            ],
            r"line 2: calls\[1\].keep: expected 0 to 2",
        ),
        ([{"id": "r", "group": "g", "calls": [[0, [1]]]}], r"line 1: calls\[0\]: expected \[keep"),
        ([{"id": "r", "group": "g", "calls": [[2, [1], [2]]]}], r"line 1: calls\[0\]"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, lines, message):
    path = tmp_path / "wrong.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(RecordingError, match=message):
        read_recording(path)


def test_a_line_that_was_cut_off(tmp_path):
    path = written(tmp_path, [agl_fast.Rollout("r", "g", [])])
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(RecordingError, match=r"line 2: not JSON: .*was it cut off\?"):
        read_recording(path)


def test_compressed_data_that_was_cut_off(tmp_path):
    path = written(tmp_path, [agl_fast.Rollout("r", "g", [])], "r.jsonl.gz")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(RecordingError, match="the compressed data is damaged"):
        read_recording(path)


def test_nan_is_no_json(tmp_path):
    path = tmp_path / "nan.jsonl"
    path.write_text(json.dumps(HEADER) + '\n{"rollout_id": "r", "reward": NaN}\n')
    with pytest.raises(RecordingError, match="line 2: not JSON: NaN is no number"):
        read_recording(path)


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_a_recording_is_utf_8_and_its_owner_s(tmp_path, name):
    """What came as bytes that are no UTF-8 is written as JSON escapes, and read as it was."""
    call = agl_fast.Call([1], [2], agent="caf\udce9", finish_reason="\udfff")
    rollout = agl_fast.Rollout("ro-1", "d", [call], sample={"q": "ä\ud800"})
    path = written(tmp_path, [rollout, agl_fast.Rollout("ro-2", "ä", [])], name)
    raw = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
    assert "ä" in raw.decode("utf-8")
    first, _ = read_recording(path).rollouts
    assert first.calls[0].agent == "caf\udce9"
    assert first.sample == {"q": "ä\ud800"}
    assert path.stat().st_mode & 0o777 == 0o600
