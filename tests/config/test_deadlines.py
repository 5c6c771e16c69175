"""Every wait of a run has a limit that the configuration sets."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu] or [verl]")

from agl_fast.verl.config import compose
from agl_fast.verl.config.schema import DeadlineKeys
from agl_fast.verl.supervision.deadlines import GROUP, UNKNOWN_BYTES, Deadlines, default_deadlines
from support.verl_settings import documented

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl, vLLM and what they import

RATE = 50e6  # bytes_per_second


def deadlines(**changes: object) -> Deadlines:
    settings = documented(**{f"agentlightning__deadlines__{key}": changes[key] for key in changes})
    return Deadlines.of(compose(settings, device="cuda").config)


def test_every_key_is_a_limit_and_every_limit_names_its_key() -> None:
    limits = {field.name: getattr(default_deadlines(), field.name) for field in fields(Deadlines)}
    names = set(DeadlineKeys.model_fields) - {"bytes_per_second"}
    assert names == {f"{name}_seconds" for name in limits}
    for name, limit in limits.items():
        assert limit.key == f"{GROUP}.{name}_seconds"
        assert limit.seconds > 0


def test_limits_grow_with_the_model(tmp_path: Path) -> None:
    for file in ("model-1.safetensors", "model-2.safetensors"):
        (tmp_path / file).write_bytes(bytes(50_000_000))
    settings = documented(actor_rollout_ref__model__path=str(tmp_path))
    settings["agentlightning"] = {"deadlines": {"bytes_per_second": 1e6}}
    found = Deadlines.of(compose(settings, device="cuda").config)
    assert found.start.seconds == 1800 + 3 * 100
    assert found.checkpoint.seconds == 3600 + 8 * 100
    assert found.sync.seconds == 300 + 2 * 100


def test_a_model_of_unknown_size_has_the_time_of_70_billion_parameters() -> None:
    found = deadlines()
    assert UNKNOWN_BYTES == 2 * 70e9
    assert found.start.seconds == 1800 + 3 * UNKNOWN_BYTES / RATE
    # 840 GB of parameters and optimizer at 50 MB/s
    assert found.checkpoint.seconds > 840e9 / RATE
    assert found == default_deadlines()


def test_what_is_set_holds_whatever_the_model() -> None:
    found = deadlines(start_seconds=60.0, sync_seconds=1.5, update_seconds=7)
    assert (found.start.seconds, found.sync.seconds, found.update.seconds) == (60.0, 1.5, 7.0)
    assert str(found.start) == f"60 s ({GROUP}.start_seconds)"


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", list(DeadlineKeys.model_fields))
def test_a_limit_is_a_finite_number_above_zero(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{GROUP}\.{name}={value}: expected a finite number"):
        deadlines(**{name: value})


def test_only_limits_that_follow_the_model_may_be_open() -> None:
    with pytest.raises(TypeError, match=rf"{GROUP}\.update_seconds=None: expected float"):
        deadlines(update_seconds=None)
