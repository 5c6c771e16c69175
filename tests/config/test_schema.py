"""The schema of `agentlightning.*` is the only place that says what its keys are."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu] or [verl]")

from omegaconf import OmegaConf
from pydantic import BaseModel

from agl_fast.verl.config import OWN_CONFIG
from agl_fast.verl.config.key_checks import check_keys
from agl_fast.verl.config.schema import GROUP, TABLES, AgentLightningKeys
from support.paths import ROOT

GROUPS = [*(group for group, _ in TABLES.values()), AgentLightningKeys]


def error_of(settings: dict[str, Any]) -> Exception:
    with pytest.raises((TypeError, ValueError)) as caught:
        check_keys({GROUP: settings}, {GROUP: {}})
    return caught.value


def test_generated_files_are_up_to_date() -> None:
    path = ROOT / "scripts" / "generate_config.py"
    spec = importlib.util.spec_from_file_location("generate_config", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for file, text in script.generated().items():
        assert file.read_text() == text, f"{file.name} is out of date: run `make generate`"


def test_config_yaml_holds_the_defaults() -> None:
    own = OmegaConf.to_container(OmegaConf.load(OWN_CONFIG))
    assert isinstance(own, dict)
    assert own[GROUP] == AgentLightningKeys().model_dump()


@pytest.mark.parametrize("group", GROUPS)
def test_every_key_has_a_meaning_and_a_valid_default(group: type[BaseModel]) -> None:
    assert [name for name, field in group.model_fields.items() if not field.description] == []
    group.model_validate(group().model_dump())


def test_every_key_is_in_one_table() -> None:
    of_tables = [
        f"{prefix}.{key}" for group, prefix in TABLES.values() for key in group.model_fields
    ]
    of_schema = []
    for name, field in AgentLightningKeys.model_fields.items():
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            of_schema += [f"{GROUP}.{name}.{key}" for key in nested.model_fields]
        else:
            of_schema.append(f"{GROUP}.{name}")
    assert sorted(of_tables) == sorted(of_schema)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": None}, "port=None: expected int, got null"),
        ({"port": -1}, "port=-1: expected a port from 0 to 65535"),
        ({"credit": "fair"}, "credit='fair': expected one of identical, last_call, discounted, pe"),
        ({"mode": 0}, "mode=0: expected one of v0, v1 or null"),
        ({"credit_discount": True}, "credit_discount=True: expected float, got true or false"),
        (
            {"first_runner_seconds": 0},
            "first_runner_seconds=0: expected a finite number above 0 or",
        ),
        ({"proxy": []}, "proxy=[]: expected a mapping, got a list"),
        ({"proxy": {"max_connections": 1.0}}, "proxy.max_connections=1.0: expected int, got float"),
        ({"trace_aggregator": {"trim": 1}}, "aggregator.trim=1: expected true or false, got int"),
        ({"deadlines": {"nap": 1}, "port": ""}, "has a key agentlightning.deadlines.nap"),
    ],
)
def test_errors_name_key_value_and_expectation(settings: dict[str, Any], message: str) -> None:
    assert message in str(error_of(settings))


def test_wrong_types_are_type_errors_and_others_are_not() -> None:
    assert isinstance(error_of({"port": "80"}), TypeError)
    assert isinstance(error_of({"port": 70000}), ValueError)
