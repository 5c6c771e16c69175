"""Misspelt and misplaced keys of agl_fast are named, first of all."""

from __future__ import annotations

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu] or [verl]")

from agl_fast.verl.config import compose
from verl_settings import documented

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl, vLLM and what they import

AGGREGATOR = "agentlightning.trace_aggregator"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("agentlightning.level", f"{AGGREGATOR}.level"),
        (f"{AGGREGATOR}.lvl", f"{AGGREGATOR}.level"),
        (f"{AGGREGATOR}.levels", f"{AGGREGATOR}.level"),
        ("agentlightning.hook", "agentlightning.rollout_hook"),
        ("agentlightning.prot", "agentlightning.port"),
        (f"{AGGREGATOR}.port", "agentlightning.port or agentlightning.proxy.port"),
        ("agentlightning.trace_agregator.level", "agentlightning.trace_aggregator"),
    ],
)
def test_a_key_that_agl_fast_does_not_have_is_said_first(key: str, meant: str) -> None:
    settings = documented(custom_reward_function={"name": "score"}, **{key.replace(".", "__"): 1})
    lines = compose(settings, device="cuda").lines
    unknown = key.removesuffix(".level") if ".trace_agregator." in key else key
    assert lines[0] == (
        f"{unknown} is not a key of agl_fast, which does not read it; did you mean {meant}?"
    )
    assert not [line for line in lines[1:] if unknown in line]


def test_a_key_of_a_subclass_stays() -> None:
    composed = compose(documented(agentlightning__of_my_daemon={"a": 1}), device="cuda")
    assert composed.config.agentlightning.of_my_daemon == {"a": 1}
    assert composed.lines[0].startswith("agentlightning.of_my_daemon is not a key of agl_fast")


def test_keys_of_agl_fast_are_not_named() -> None:
    settings = documented(agentlightning={"proxy": {"port": 1}, "trace_aggregator": {"trim": True}})
    assert not [line for line in compose(settings, device="cuda").lines if "not a key" in line]
