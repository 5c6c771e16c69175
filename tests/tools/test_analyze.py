"""`python -m agl_fast analyze`: what it counts is what `build_batch` builds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import agl_fast
from agl_fast.__main__ import main
from agl_fast.recording import RecordingWriter
from agl_fast.rows.levels import LEVELS
from agl_fast.rows.options import Limits, limits_of
from agl_fast.tools.analyze import Analysis, Traces, analyze, as_json, as_text, read_traces
from agl_fast.tools.analyze.advice import advice, best_level
from agl_fast.tools.analyze.layouts import Layout, lay_out
from support.plain_rollouts import PlainRollout, rollout, to_native
from support.simulated_agents import Tokenizer, several_rollouts
from support.token_traces import DATA, TRACES

SPLIT = {"max_prompt_length": 2048, "max_response_length": 4096, "tree_max_tokens": 8192}
WHOLE: dict[str, int] = {}


def limits(given: dict[str, Any]) -> dict[Any, Limits]:
    return {level: limits_of(level, None, given) for level in LEVELS}


def analyzed(rollouts: Sequence[PlainRollout], **given: int) -> Analysis:
    native = [to_native(each) for each in rollouts]
    return analyze(Traces("here", native, limits(given)))


def assert_counts_what_is_built(layout: Layout, batch: agl_fast.Batch) -> None:
    """Against the padded tensors, which the analysis does not build."""
    tensors = batch.tensors
    kept = ~tensors["is_drop_mask"]
    n_tokens = tensors["attention_mask"].sum(dim=1)[kept]
    assert layout.rows == int(kept.sum())
    assert layout.marked_rows == len(batch) - layout.rows
    assert layout.tokens == int(n_tokens.sum())
    assert layout.longest_row == int(n_tokens.max() if len(n_tokens) else 0)
    assert layout.accounting == batch.accounting
    n_trained = int(tensors["response_mask"][kept].sum())
    assert n_trained == layout.accounting.trained
    if layout.level == "tree":
        real = tensors["attention_mask"].bool()
        assert layout.attended == int((tensors["position_ids"] + 1)[real].sum())
        assert layout.scored == n_trained
        assert layout.padded_tokens is None
    else:
        assert layout.attended == int((n_tokens * (n_tokens + 1) // 2).sum())
        assert layout.scored == layout.tokens
        assert layout.padded_tokens == layout.rows * tensors["input_ids"].shape[1]


@pytest.mark.parametrize("given", [WHOLE, SPLIT], ids=["whole", "cut"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", TRACES)
def test_real_traces_are_counted_as_built(name: str, level: Any, given: dict[str, int]) -> None:
    traces = read_traces([DATA / f"{name}.jsonl.gz"], given)
    rollouts = traces.rollouts[:5]
    chosen = traces.limits[level]
    batch = agl_fast.build_batch(rollouts, **chosen.options(level, trim=given == WHOLE).keywords())
    assert_counts_what_is_built(lay_out(rollouts, level, chosen).layout, batch)


SMALL_LIMITS = st.fixed_dictionaries(
    {
        "max_prompt_length": st.integers(1, 12),
        "max_response_length": st.integers(1, 24),
        "max_total_length": st.none() | st.integers(1, 24),
        "tree_max_tokens": st.integers(1, 40),
        "overlong_prompt": st.sampled_from([None, "spill", "drop"]),
        "truncated_rollouts": st.sampled_from(["train", "mask", "zero_reward"]),
    }
)


@given(several_rollouts(), st.sampled_from(LEVELS), SMALL_LIMITS)
def test_simulated_agents_are_counted_as_built(
    rollouts: list[PlainRollout], level: Any, given: dict[str, Any]
) -> None:
    native = [to_native(each) for each in rollouts]
    chosen = Limits(**given)
    found = lay_out(native, level, chosen).layout
    try:
        batch = agl_fast.build_batch(native, **chosen.options(level).keywords())
    except agl_fast.EmptyBatchError as error:
        empty = error.accounting
    else:
        assert_counts_what_is_built(found, batch)
        return
    assert found.accounting == empty
    assert (found.rows, found.tokens, found.attended, found.scored) == (0, 0, 0, 0)


@given(several_rollouts())
def test_every_analysis_can_be_shown(rollouts: list[PlainRollout]) -> None:
    native = [to_native(each) for each in rollouts]
    if not lay_out(native, "transition", Limits()).layout.rows:
        with pytest.raises(ValueError, match="there is nothing to analyze"):
            analyzed(rollouts)
        return
    found = analyzed(rollouts, max_response_length=3, tree_max_tokens=9)
    text = as_text(found)
    assert advice(found) in text
    told = json.loads(json.dumps(as_json(found)))
    assert told["layouts"]["tree"]["rows"] == found.layouts["tree"].rows
    assert sum(each["calls"] for each in told["breaks"]) == sum(each.calls for each in found.breaks)


def test_the_whole_of_a_small_trace() -> None:
    """[1,2]→[3]; [1,2,3,7]→[4]; [1,2,8]→[5]: two chains, one tree of 7 tokens."""
    found = analyzed([rollout(([1, 2], [3]), ([1, 2, 3, 7], [4]), ([1, 2, 8], [5]), reward=1.0)])
    assert (found.rollouts, found.calls, found.sampled, found.longest_call) == (1, 3, 3, 5)
    counts = [
        (each.rows, each.tokens, each.longest_row, each.padded_tokens, each.attended, each.scored)
        for each in found.layouts.values()
    ]
    assert counts == [
        (3, 12, 5, 3 * (4 + 1), 6 + 15 + 10, 12),
        (2, 9, 5, 2 * (3 + 3), 15 + 10, 9),
        (1, 7, 7, None, 1 + 2 + 3 + 4 + 5 + 3 + 4, 3),
    ]
    (broken,) = found.breaks
    assert (broken.kind, broken.calls, broken.tokens) == ("history_rewritten", 1, 2)


def test_rewards_are_those_of_training() -> None:
    found = analyzed(
        [
            rollout(([1], [2], {"reward": 0.5}), rollout_id="a", data_id="s"),
            rollout(([1], [2]), rollout_id="b", data_id="s", reward=0.5),
            rollout(([1], [2]), rollout_id="c", data_id="t", reward=2.0),
            rollout(([1], [2]), rollout_id="d", data_id="t", status="failed"),
            rollout(([1], [2]), rollout_id="e", data_id="u", reward=float("nan")),
        ]
    )
    rewards = found.rewards
    assert (rewards.mean, rewards.lowest, rewards.highest, rewards.missing) == (0.6, 0, 2, 2)
    assert (rewards.groups, rewards.flat_groups) == (2, 1)
    assert found.statuses == {"failed": 1}


# Each: what a second call's prompt is, after [1, 2, 3] → [4, 5].
BREAKS = [
    ([1, 2, 3, 4, 5, 6], []),
    ([1, 2, 3, 4, 9], ["history_rewritten"]),
    ([1, 2, 3, 4], ["shortened"]),
    ([1, 2, 9, 4, 5], ["generation_prompt"]),
    ([1, 2, 4, 5], ["generation_prompt"]),
    ([1, 2, 9, 9], ["new_conversation"]),
    ([8, 2, 3], ["new_conversation"]),
]


@pytest.mark.parametrize(("prompt", "kinds"), BREAKS)
def test_breaks(prompt: list[int], kinds: list[str]) -> None:
    found = analyzed([rollout(([1, 2, 3], [4, 5]), (prompt, [7]))])
    assert [each.kind for each in found.breaks] == kinds


def test_a_conversation_of_its_own_is_no_break_to_mend() -> None:
    system = list(range(10, 20))
    first = system + list(range(100, 200))
    found = analyzed([rollout((first, [4, 5]), ([*system, 7, 8, 9], [6]))])
    (each,) = found.breaks
    assert (each.kind, each.tokens) == ("new_conversation", 10)
    assert "No call breaks the prefix" in advice(found)


def test_the_end_of_a_prompt_that_history_leaves_out() -> None:
    """As Qwen3's empty think block: what the real trace is found to be."""
    found = analyze(read_traces([DATA / "swe_nothink.jsonl.gz"]))
    (each,) = found.breaks
    assert (each.kind, each.calls) == ("generation_prompt", 208)
    assert "In most cases (208), the history lacks what the chat template puts" in advice(found)


def test_a_tokenizer_tells_what_was_tokenised_anew() -> None:
    plain = rollout(([7], [0, 0]), ([7, 4], [1]))  # its "aa" in one token
    traces = Traces("here", [to_native(plain)], limits({}))
    assert [each.kind for each in analyze(traces).breaks] == ["history_rewritten"]
    found = analyze(traces, tokenizer=Tokenizer())
    assert [each.kind for each in found.breaks] == ["retokenised"]
    assert found.causes == {"retokenised": 1}
    assert "in 1 the history was tokenised again, to other ids for the same text" in advice(found)
    assert "--tokenizer" not in advice(found)
    assert "retokenised (retoken)" in as_text(found)


def test_advice_names_the_level_that_is_worth_it() -> None:
    think = analyze(read_traces([DATA / "swe_think.jsonl.gz"]))
    assert best_level(think) == "tree"
    assert "level tree: 6.35× fewer tokens than one row a call, 5.61× fewer" in advice(think)
    longer = list(range(1, 50))
    merging = analyzed([rollout((longer[:40], [90]), ([*longer[:40], 90, 8], [91]))])
    assert best_level(merging) == "trajectory"
    assert "Level tree saves too little here: 1.00×" in advice(merging)
    single = analyzed([rollout(([1, 2], [3]))])
    assert best_level(single) == "transition"
    assert "Level tree saves too little here: 1.00×" in advice(single)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"max_response_length": 50}, "nothing is lost with max_prompt_length=40 and "),
        ({"max_prompt_length": 60}, "Nothing is lost to limits with max_prompt_length=40 and "),
    ],
)
def test_advice_on_limits(given: dict[str, int], told: str) -> None:
    prompt, answer = list(range(1, 41)), list(range(100, 160))
    plain = rollout((prompt, answer), ([*prompt, *answer, 8], [91]))
    found = analyzed([plain], **given)
    assert told in advice(found)
    fitting = {"max_prompt_length": 40, "max_response_length": 62}
    assert "max_response_length=62" in advice(found)
    assert analyzed([plain], **fitting).layouts["trajectory"].lost == 0
    assert analyzed([plain], **{**fitting, "max_response_length": 61}).layouts["trajectory"].lost


def test_advice_on_the_limit_of_both() -> None:
    prompt, answer = list(range(1, 41)), list(range(100, 160))
    native = [to_native(rollout((prompt, answer), ([*prompt, *answer, 8], [91])))]
    cut = {"trajectory": Limits(max_total_length=60)}
    found = analyze(Traces("here", native, limits({}) | cut))
    assert found.layouts["trajectory"].lost == 41
    fitting = "max_prompt_length=40, max_response_length=62 and max_total_length=102"
    assert f"nothing is lost with {fitting}." in advice(found)


def test_advice_on_trees() -> None:
    found = analyze(read_traces([DATA / "swe_think.jsonl.gz"], {"tree_max_tokens": 15298}))
    assert found.layouts["tree"].lost > 0
    assert "nothing is lost with tree_max_tokens=15299" in advice(found)
    again = analyze(read_traces([DATA / "swe_think.jsonl.gz"], {"tree_max_tokens": 15299}))
    assert again.layouts["tree"].lost == 0


ABOUT = {
    "rows": {
        "level": "trajectory",
        "max_prompt_length": 5,
        "max_response_length": 7,
        "max_total_length": None,
        "overlong_prompt": "drop",
        "truncated_rollouts": "mask",
        "tree_max_tokens": 64,
    },
    "settings": {"data": {"max_prompt_length": 3}},
}


def test_limits_of_a_header() -> None:
    shared = {"overlong_prompt": "drop", "truncated_rollouts": "mask"}
    assert limits_of("trajectory", ABOUT, None) == Limits(
        max_prompt_length=5, max_response_length=7, **shared
    )
    assert limits_of("transition", ABOUT, None) == Limits(max_prompt_length=3, **shared)
    assert limits_of("tree", ABOUT, None) == Limits(tree_max_tokens=64)
    given = {"max_prompt_length": 9, "tree_max_tokens": None}
    assert limits_of("transition", ABOUT, given) == Limits(max_prompt_length=9, **shared)
    assert limits_of("tree", ABOUT, given) == Limits(tree_max_tokens=64)
    of_tree = {"rows": {"level": "tree"}, "settings": {"agentlightning": {"trace_aggregator": {}}}}
    assert limits_of("trajectory", of_tree, None) == Limits()


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"rows": 5}, "rows: expected an object in the recording's header, got 5"),
        ({"settings": {"data": [1]}}, "data: expected an object"),
        ({"rows": {"level": "transition", "max_prompt_length": "5"}}, "max_prompt_length must be"),
        ({"rows": {"truncated_rollouts": "drop"}}, "truncated_rollouts must be one of"),
    ],
)
def test_a_header_of_another_kind(tmp_path: Path, about: dict[str, Any], message: str) -> None:
    path = recorded(tmp_path / "a.jsonl", about, rollout(([1, 2], [3, 4])))
    with pytest.raises((TypeError, ValueError), match=message):
        analyze(read_traces([path]))


def recorded(path: Path, about: dict[str, Any], *rollouts: PlainRollout) -> Path:
    with RecordingWriter(path, about) as writer:
        writer.write_many(to_native(each) for each in rollouts)
    return path


def test_several_files_are_one(tmp_path: Path) -> None:
    """Steps of a run have rollouts of the same name only by chance; they are not one."""
    plain = rollout(([1, 2], [3, 4]))
    paths = [recorded(tmp_path / f"{i}.jsonl", ABOUT, plain) for i in range(2)]
    traces = read_traces(paths)
    assert traces.limits["trajectory"].max_response_length == 7
    assert len({each.rollout_id for each in traces.rollouts}) == 2
    assert len({each.data_id for each in traces.rollouts}) == 2
    assert analyze(traces).layouts["transition"].rows == 2


def test_files_of_other_limits(tmp_path: Path) -> None:
    plain = rollout(([1, 2], [3, 4]))
    other = {"rows": {**ABOUT["rows"], "max_response_length": 8}, "settings": ABOUT["settings"]}
    paths = [recorded(tmp_path / "a.jsonl", ABOUT, plain), tmp_path / "b.jsonl"]
    recorded(paths[1], other, plain)
    with pytest.raises(
        ValueError, match=r"max_response_length: at level trajectory, .*a\.jsonl was"
    ):
        read_traces(paths)
    assert read_traces(paths, {"max_response_length": 9}).rollouts


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recorded(tmp_path / "a.jsonl.gz", ABOUT, rollout(([1, 2], [3, 4]), reward=0.5))
    assert main(["analyze", str(path), "--max-response-length", "1"]) == 0
    shown = capsys.readouterr().out
    assert "1 rollouts, 1 calls, 2 sampled tokens; the longest call has 4 tokens" in shown
    assert re.search(r"^max_response_length +1 +1 +-$", shown, re.MULTILINE)
    assert "nothing is lost with max_prompt_length=2 and max_response_length=2" in shown
    assert main(["analyze", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["limits"]["trajectory"]["max_response_length"] == 7
    assert told["layouts"]["transition"]["accounting"]["trained"] == 2
    assert told["model"] is None
    assert told["advice"].startswith("Level transition is sufficient")


def test_files_need_neither_verl_nor_agentlightning() -> None:
    code = (
        "import sys; from agl_fast.__main__ import main; main(sys.argv[1:]);"
        "print(sorted({'verl', 'agentlightning', 'transformers', 'ray'} & set(sys.modules)))"
    )
    path = DATA / "swe_plain.jsonl.gz"
    command = [sys.executable, "-c", code, "analyze", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "[]"
    assert ended.stderr == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl"),
        (["empty.jsonl"], "empty.jsonl: the file is empty"),
        (["none.jsonl"], "none.jsonl: there are no rollouts"),
        (["bare.jsonl"], "there is nothing to analyze"),
        (["a.jsonl", "--max-prompt-length", "0"], "max_prompt_length must be"),
        (["a.jsonl", "--max-response-length", "0"], "max_response_length must be"),
        (["a.jsonl", "--tree-max-tokens", "-1"], "tree_max_tokens must be"),
        (["a.jsonl", "--micro-batch-tokens", "0"], "micro_batch_tokens must be"),
        (["a.jsonl", "--model", "nowhere"], "nowhere"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    recorded(Path("a.jsonl"), {}, rollout(([1, 2], [3, 4])))
    recorded(Path("none.jsonl"), {})
    recorded(Path("bare.jsonl"), {}, rollout(([1, 2], [])))
    Path("empty.jsonl").write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["analyze", *options])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("agl_fast analyze: ")
    assert message in line


@pytest.mark.parametrize(
    "options",
    [[], ["a.jsonl", "--store", "http://localhost:1"], ["a.jsonl", "--tflops", "10"]],
)
def test_what_does_not_go_together(options: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["analyze", *options])
