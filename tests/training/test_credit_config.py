"""Settings of credit and of the servers' log-probs."""

from __future__ import annotations

from typing import Any

import pytest

from agl_fast.verl.config import compose
from support.verl_settings import documented

ROW_LEVEL = {"algorithm__enable_rollout_level_advantage": False}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"agentlightning__credit": "fair"}, "one of identical, last_call, discounted, per_call"),
        ({"agentlightning__credit_discount": 1.5}, "credit_discount=1.5: expected a number from 0"),
        ({"agentlightning__rollout_hook": "os.path"}, "rollout_hook='os.path': expected module:"),
        ({"agentlightning__rollout_hook": "no_such:hook"}, "no_such cannot be imported"),
        ({"agentlightning__missing_rollout_log_probs": "ask"}, "one of recompute, drop"),
        ({**ROW_LEVEL, "agentlightning__credit": "last_call"}, "credit='last_call': expected 'id"),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compose(documented(**settings), device="cuda")


def test_defaults() -> None:
    config = compose(documented(), device="cuda").config
    assert config.algorithm.enable_rollout_level_advantage is True
    ours = config.agentlightning
    assert (ours.rollout_hook, ours.credit) == (None, "identical")
    assert ours.missing_rollout_log_probs == "recompute"
    row_level = compose(documented(**ROW_LEVEL), device="cuda").config
    assert row_level.algorithm.enable_rollout_level_advantage is False


def test_weights_beside_bypass_are_reported() -> None:
    correction = {"bypass_mode": True, "rollout_is": "token"}
    settings = documented(algorithm__rollout_correction=correction)
    lines = compose(settings, device="cuda").lines
    assert any("rollout_is does nothing with bypass_mode" in line for line in lines)
