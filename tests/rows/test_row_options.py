"""One definition of the row options: everybody who takes options takes those of `RowOptions`."""

import inspect
import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import agl_fast
from agl_fast import reference
from agl_fast.recording import RecordingWriter, read_recording
from agl_fast.rows.levels import LEVELS, Level
from agl_fast.rows.options import (
    CommonRowKeywords,
    Limits,
    RowKeywords,
    RowOptions,
    config_keys,
    header_to_config,
    limits_of,
)
from agl_fast.tools.replay.replay import replayed_config
from agl_fast.verl.config import compose
from support.paths import ROOT
from support.verl_settings import documented

NAMES = {each.name for each in fields(RowOptions)}
RECORDED = {each.name for each in fields(RowOptions) if each.metadata["recorded"]}
OWN_CONFIG = OmegaConf.load(ROOT / "python" / "agl_fast" / "verl" / "config" / "config.yaml")
# A value of each recorded option that is no default.
OTHERS: dict[str, Any] = {
    "max_prompt_length": 5,
    "max_response_length": 7,
    "overlong_prompt": "drop",
    "truncated_rollouts": "mask",
    "tree_max_tokens": 64,
    "trim": True,
    "pad_token_id": 3,
    "reward_fillna_value": -1.0,
}
REQUIRED = {name: OTHERS[name] for name in ("max_prompt_length", "max_response_length")}
# What a run of agl_fast 0.1 wrote, and a run without a total limit.
HEADER_OF_0_1 = {
    "level": "trajectory",
    "max_prompt_length": 5,
    "max_response_length": 7,
    "max_total_length": None,
    "overlong_prompt": None,
    "truncated_rollouts": "zero_reward",
    "tree_max_tokens": 64,
    "trim": True,
    "pad_token_id": 3,
    "reward_fillna_value": -1.0,
}


@pytest.mark.parametrize(
    "function", [agl_fast.build_batch, agl_fast.BatchBuilder, reference.build_batch]
)
def test_builders_take_every_option_by_keyword(function):
    parameters = inspect.signature(function).parameters
    expected = inspect.signature(RowOptions).parameters
    assert parameters.keys() >= NAMES
    for name in NAMES:
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default == expected[name].default
    assert parameters.keys() - NAMES <= {"rollouts", "device", "reuse_buffers"}


def test_keywords_are_the_fields():
    assert RowKeywords.__annotations__.keys() == NAMES
    dry_run = inspect.signature(agl_fast.dry_run).parameters
    assert dry_run.keys() >= CommonRowKeywords.__annotations__.keys() | REQUIRED.keys()
    for name in CommonRowKeywords.__annotations__:
        assert dry_run[name].default == inspect.signature(RowOptions).parameters[name].default


def test_an_unknown_option_is_refused():
    for function in (agl_fast.build_batch, reference.build_batch):
        with pytest.raises(TypeError, match="max_promt_length"):
            function([agl_fast.Rollout("r", "d", [])], max_promt_length=1, **OTHERS)


@pytest.mark.parametrize("level", LEVELS)
def test_recording_and_configuration_hold_every_recorded_option(level, tmp_path):
    options = RowOptions(level=level, **OTHERS)
    path = tmp_path / "a.jsonl"
    with RecordingWriter(path, {"rows": options.to_header()}) as writer:
        writer.write(agl_fast.Rollout("r", "d", [agl_fast.Call([1], [2])]))
    recording = read_recording(path)
    assert recording.about["rows"].keys() == RECORDED
    config = replayed_config(recording, {})
    assert RowOptions.from_config(config, pad_token_id=3) == options


def test_a_total_limit_is_recorded_where_a_level_has_one(tmp_path):
    options = RowOptions(level="trajectory", max_total_length=9, **OTHERS)
    assert RowOptions.from_config(options.to_config(), pad_token_id=3) == options


@pytest.mark.parametrize("name", sorted(set(OTHERS) - {"pad_token_id"}))
@pytest.mark.parametrize("level", LEVELS)
def test_every_option_of_the_configuration_reaches_the_rows(level, name):
    """Each has a key, which `config.yaml` or verl knows, at every level."""
    config = compose(documented()).config
    OmegaConf.update(config, "agentlightning.trace_aggregator.level", level)
    key = config_keys(level)[name]
    assert OmegaConf.select(config, key, default="absent") != "absent"
    OmegaConf.update(config, key, OTHERS[name])
    assert getattr(RowOptions.from_config(config), name) == OTHERS[name]


def test_defaults_are_those_of_the_configuration():
    defaults = RowOptions(pad_token_id=0, **REQUIRED)
    of_config = RowOptions.from_config(OWN_CONFIG, **REQUIRED)
    # A run defaults to Agent-lightning's level, and to narrow batches.
    assert of_config == replace(defaults, level="transition", trim=True)
    assert RowOptions.from_config({}, **REQUIRED) == of_config
    for level in LEVELS:
        keys = [key for key in config_keys(level).values() if key.startswith("agentlightning.")]
        assert all(OmegaConf.select(OWN_CONFIG, key, default="") != "" for key in keys)


def test_headers_of_0_1_are_read(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    header = {"recording": "agl_fast", "version": 1, "agl_fast": "0.1.0"}
    header["about"] = {"rows": HEADER_OF_0_1}
    rollout = {"rollout_id": "r", "data_id": "d", "calls": []}
    path.write_text(f"{json.dumps(header)}\n{json.dumps(rollout)}\n")
    recording = read_recording(path)
    found = RowOptions.from_config(replayed_config(recording, {}), pad_token_id=3)
    assert found == RowOptions(**HEADER_OF_0_1)
    shared = {"overlong_prompt": None, "truncated_rollouts": "zero_reward"}
    limits = Limits(max_prompt_length=5, max_response_length=7, **shared)
    assert limits_of("trajectory", recording.about, None) == limits
    assert limits_of("tree", recording.about, None) == Limits(tree_max_tokens=64)


def test_a_header_without_an_option_leaves_it_to_the_configuration():
    older = {name: HEADER_OF_0_1[name] for name in ("level", *REQUIRED)}
    options = RowOptions.from_config(header_to_config(older))
    assert options == RowOptions(level="trajectory", trim=True, pad_token_id=0, **REQUIRED)


def test_analyze_has_the_limits_of_every_level():
    of_levels = {name for level in LEVELS for name in Level.of(level).limits}
    limits = {each.name for each in fields(Limits)}
    assert of_levels <= limits <= NAMES
    assert limits - of_levels == {"overlong_prompt", "truncated_rollouts"}
    options = Limits(max_prompt_length=5).options("tree", layout="jagged")
    assert (options.max_prompt_length, options.layout) == (5, "jagged")


@pytest.mark.parametrize("level", LEVELS)
def test_the_longest_row_is_the_sum_of_named_options(level):
    options = RowOptions(level=level, **OTHERS)
    longest = sum(getattr(options, name) for name in options.row_length_options)
    assert longest == (64 if level == "tree" else 12)
    assert all(name in config_keys(level) for name in options.row_length_options)


def test_no_other_module_compares_a_level():
    """A level's name is data elsewhere: what follows from it is a property of `Level`."""
    names = "|".join(LEVELS)
    comparison = re.compile(
        rf"(==|!=|\bin) *[(\[{{]?[\"']({names})[\"']|[\"']({names})[\"'] *[=!]="
    )
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sources()
        if path.suffix == ".py"
        for line in path.read_text().splitlines()
        if comparison.search(line) and " for " not in line
    ]
    assert found == []


def test_few_files_name_an_option():
    files = [p for p in sources() if "truncated_rollouts" in p.read_text()]
    assert len(files) <= 6, [str(p.relative_to(ROOT)) for p in files]


def sources() -> list[Path]:
    folders = ("python", "csrc")
    return [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.*"))
        if path.suffix in {".py", ".pyi", ".yaml", ".h", ".cpp", ".cu", ".cuh"}
    ]
