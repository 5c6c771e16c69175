"""A key that nobody reads is an error that names the one that was likely meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.paths import DATA

pytest.importorskip("verl", reason="needs the extra [cpu] or [verl]")

from omegaconf import OmegaConf

from agl_fast.commands.overrides import parse_overrides
from agl_fast.verl.config import compose, differences
from agl_fast.verl.config.composition import _resolved_defaults
from agl_fast.verl.config.key_checks import check_keys
from agl_fast.verl.config.user_settings import plain_settings
from support.verl_settings import documented

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl, vLLM and what they import

AGGREGATOR = "agentlightning.trace_aggregator"
OLD_KEYS = (DATA / "verl_0_6_1_keys.txt").read_text().split()


def settings_with(key: str, value: object) -> dict[str, Any]:
    *groups, name = key.split(".")
    settings: dict[str, Any] = {name: value}
    for group in reversed(groups):
        settings = {group: settings}
    return settings


def check(settings: dict[str, Any]) -> None:
    plain, added = plain_settings(settings)
    check_keys(plain, _resolved_defaults(), added)


@pytest.mark.parametrize(
    ("key", "unknown", "meant"),
    [
        ("agentlightning.level", None, f"{AGGREGATOR}.level"),
        (f"{AGGREGATOR}.lvl", None, f"{AGGREGATOR}.level"),
        (f"{AGGREGATOR}.levels", None, f"{AGGREGATOR}.level"),
        ("agentlightning.hook", None, "agentlightning.rollout_hook"),
        ("agentlightning.prot", None, "agentlightning.port"),
        ("agentlightning.trace_agregator.level", "agentlightning.trace_agregator", AGGREGATOR),
        ("agentligthning.port", "agentligthning", "agentlightning"),
        ("actor_rollout_ref.optim.lr", "actor_rollout_ref.optim", "actor_rollout_ref.actor.optim"),
        ("trainer.total_epoch", None, "trainer.total_epochs"),
        ("trainer.n_gpu_per_node", None, "trainer.n_gpus_per_node"),
        ("data.max_prompt_lenght", None, "data.max_prompt_length"),
        ("lr", None, "actor_rollout_ref.actor.optim.lr"),
        ("trace_aggregator.level", "trace_aggregator", AGGREGATOR),
    ],
)
def test_an_unknown_key_is_an_error_with_the_near_miss(
    key: str, unknown: str | None, meant: str
) -> None:
    with pytest.raises(ValueError, match="neither verl nor agl_fast has a key") as caught:
        check(settings_with(key, 1))
    assert f"has a key {unknown or key} (did you mean " in str(caught.value)
    named = str(caught.value).partition("did you mean ")[2].partition("?")[0]
    assert meant in named.split(" or ")


def test_a_key_that_resembles_none_is_an_error_too() -> None:
    with pytest.raises(ValueError, match=r"has a key zzz \(nor one with a similar name\)\. Write"):
        check({"zzz": 1})


def test_every_unknown_key_is_named_and_before_wrong_values() -> None:
    settings = {"trainer": {"nnodes": "1", "a_b": 1}, "zzz": {"b": 2}}
    with pytest.raises(ValueError, match=r"has a key trainer\.a_b \(.*; zzz \(.*a plus: '\+a_b'"):
        check(settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"+mine": {"new": {"keys": 1}}},
        {"mine": {"+new": 1}},
        {"data": {"+also_mine": 1}},
        {"agentlightning": {"++of_my_daemon": {"a": 1}}},
        {"trainer": {"+nnodes": 1}},  # known: as in a script for an older verl
        OmegaConf.create({"data": {"+also_mine": 1}}),
        parse_overrides(["+data.also_mine=1", "++mine.own=2", "+trainer.nnodes=1"]),
    ],
)
def test_a_plus_lets_a_key_pass(settings: dict[str, Any]) -> None:
    check(settings)
    plain, added = plain_settings(settings)
    assert added
    assert "+" not in str(plain)


def test_a_plus_lets_nothing_else_pass() -> None:
    with pytest.raises(ValueError, match=r"has a key data\.other \("):
        check({"data": {"+mine": 1, "other": 1}})
    with pytest.raises(ValueError, match=r"data\.mine is set twice"):
        plain_settings({"data": {"+mine": 1, "mine": 1}})
    with pytest.raises(
        ValueError, match=r"clip_ratio_hi=1: .*unknown key, verl's FSDPActorConfig has none"
    ):
        check({"actor_rollout_ref": {"actor": {"+clip_ratio_hi": 1}}})


def test_an_added_key_is_in_the_configuration_and_in_what_is_recorded_of_it() -> None:
    composed = compose(documented(**{"agentlightning__+of_my_daemon": {"a": 1}}), device="cuda")
    assert composed.config.agentlightning.of_my_daemon == {"a": 1}
    recorded = differences(composed.config)
    with pytest.raises(ValueError, match=r"has a key agentlightning\.of_my_daemon"):
        compose(recorded, device="cuda")
    again = compose(recorded, device="cuda", added=["agentlightning.of_my_daemon"])
    assert again.config.agentlightning.of_my_daemon == {"a": 1}


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({1: 2}, ValueError, "^1: expected a name without dots"),
        ({"data": {None: 2}}, ValueError, r"^data\.None: expected a name without dots"),
        (
            {"data": {"seed": float("nan")}},
            ValueError,
            r"^data\.seed=nan: expected a finite number",
        ),
        ({"data": {"seed": "???"}}, ValueError, r"^data\.seed='\?\?\?': expected a value"),
        ({"data": {"val_files": ["a", {1}]}}, TypeError, r"^data\.val_files\[1\]=\{1\}: expected"),
        ({"data": {"seed": b"1"}}, TypeError, r"^data\.seed=b'1': .*got bytes"),
    ],
)
def test_what_no_configuration_holds_is_named(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plain_settings(settings)


def test_numbers_of_numpy_paths_and_tuples_become_plain() -> None:
    settings = {"a": np.int64(3), "b": [np.float32(0.5)], "c": Path("x"), "d": (1, Path("y"))}
    assert plain_settings(settings)[0] == {"a": 3, "b": [0.5], "c": "x", "d": [1, "y"]}
    assert type(plain_settings(settings)[0]["a"]) is int
    batch = settings_with("data.train_batch_size", np.int64(32))
    check(batch)
    with pytest.raises(TypeError, match="train_batch_size=True: expected int, got true or false"):
        check(settings_with("data.train_batch_size", np.bool_(True)))


@pytest.mark.parametrize("value", ["${data.nothing}", "${oc.env:NO_SUCH_VARIABLE_AGL}", "${"])
def test_an_interpolation_that_cannot_be_filled_in_is_named(value: str) -> None:
    with pytest.raises(ValueError, match=r"data\.seed="):
        compose(documented(data__seed=value), device="cuda")


def test_a_group_is_not_null() -> None:
    with pytest.raises(TypeError, match=r"^data=None: expected a mapping, got null"):
        check({"data": None})
