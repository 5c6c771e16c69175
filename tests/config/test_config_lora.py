"""With LoRA, the servers sample with the adapter."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu] or [verl]")

from agl_fast.verl.config import compose, differences
from support.verl_settings import documented

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl, vLLM and what they import

MERGE = "actor_rollout_ref.model.lora.merge"
RANK = {"actor_rollout_ref__model__lora_rank": 8}
ADAPTER = {"actor_rollout_ref__model__lora_adapter_path": "some/adapter"}


@pytest.mark.parametrize("adapter", [RANK, ADAPTER])
def test_an_adapter_is_merged_into_what_the_servers_get(adapter: dict[str, Any]) -> None:
    composed = compose(documented(**adapter), device="cuda")
    assert composed.config.actor_rollout_ref.model.lora.merge is True
    assert [line for line in composed.lines if line.startswith(f"{MERGE}=True (")]
    again = compose(differences(composed.config), device="cuda")
    assert again.config.actor_rollout_ref.model.lora.merge is True


def test_an_adapter_that_is_not_merged_is_refused() -> None:
    settings = documented(**RANK, actor_rollout_ref__model__lora={"merge": False})
    with pytest.raises(ValueError, match=rf"{MERGE}=False: expected True, as"):
        compose(settings, device="cuda")


def test_without_an_adapter_nothing_is_merged() -> None:
    config = compose(documented(), device="cuda").config
    assert config.actor_rollout_ref.model.lora.merge is False


def test_the_rank_of_another_engine_is_refused() -> None:
    settings = documented(actor_rollout_ref__model__lora={"rank": 8})
    with pytest.raises(ValueError, match=r"lora\.rank=8: expected 0, as FSDP reads lora_rank"):
        compose(settings, device="cuda")
