"""The attention of a run on GPUs without flash-attn: chosen once, and said."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu] or [verl]")

import transformers
from omegaconf import OmegaConf

import support.verl_trainer_imports  # noqa: F401
from agl_fast.tree.engine_name import ENGINE
from agl_fast.verl import entrypoint
from agl_fast.verl.config import Composed, compose, differences
from agl_fast.verl.config import attention_choice as config_attention
from agl_fast.verl.config.attention_choice import ACTOR, CRITIC, IMPLEMENTATION, uses_engine
from support.verl_settings import documented

FLASH = "flash_attention_2"
LEVELS = ("transition", "trajectory", "tree")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """With an H100; `flash` is what importing flash_attn does: None, an error, or a module."""
    facts = SimpleNamespace(flash=None, gpus={"NVIDIA H100": (9, 0)})
    find_spec, import_module = importlib.util.find_spec, importlib.import_module

    def find(name: str, *rest: Any) -> Any:
        if name == "flash_attn":
            return facts.flash
        return find_spec(name, *rest)

    def load(name: str, *rest: Any) -> Any:
        if name != "flash_attn":
            return import_module(name, *rest)
        if isinstance(facts.flash, Exception):
            raise facts.flash
        return facts.flash

    monkeypatch.setattr(config_attention.importlib.util, "find_spec", find)
    monkeypatch.setattr(config_attention.importlib, "import_module", load)
    monkeypatch.setattr(config_attention, "gpus", lambda: facts.gpus)
    return facts


def model_of(folder: Path, kind: str = "qwen2", **settings: Any) -> str:
    """A folder with the configuration of a small model, and no weights."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 128,
    }
    config = transformers.AutoConfig.for_model(kind, **(sizes | settings))
    config.architectures = ["AnyForCausalLM"]
    config.save_pretrained(folder / kind)
    return str(folder / kind)


def composed(path: str, device: str = "cuda", **changes: Any) -> Composed:
    return compose(
        documented(actor_rollout_ref__model__path=path, trainer__logger=["console"], **changes),
        device=device,
    )


def attention(config: Any, group: str = ACTOR) -> Any:
    return OmegaConf.select(config, f"{group}.{IMPLEMENTATION}")


def said(found: Composed) -> list[str]:
    return [line for line in found.lines if IMPLEMENTATION in line]


@pytest.mark.parametrize("level", LEVELS)
def test_rows_without_flash_attention_train_through_our_engine(tmp_path, level, monkeypatch):
    found = composed(model_of(tmp_path), agentlightning__trace_aggregator__level=level)
    assert attention(found.config) == ENGINE
    assert found.config.actor_rollout_ref.model.use_remove_padding
    if level == "tree":
        assert said(found) == []  # it has no other
    else:
        (line,) = said(found)
        assert "flash-attn is not installed" in line
        assert "'flash-attn==2.8.3'" in line
    monkeypatch.setattr(entrypoint, "get_device_name", lambda: "cuda")
    actor, critic = entrypoint.worker_classes(found.config)
    assert actor.__name__ == "TreeActorRolloutRefWorker"
    assert critic.__name__ == ("TreeTrainingWorker" if level == "tree" else "GpuTrainingWorker")


@pytest.mark.parametrize("level", LEVELS[:2])
def test_flash_attention_that_can_be_used_is_left_to_verl(tmp_path, machine, level, monkeypatch):
    machine.flash = SimpleNamespace()
    found = composed(model_of(tmp_path), agentlightning__trace_aggregator__level=level)
    assert attention(found.config) is None
    assert said(found) == []
    monkeypatch.setattr(entrypoint, "get_device_name", lambda: "cuda")
    actor, critic = entrypoint.worker_classes(found.config)
    assert (actor.__name__, critic.__name__) == ("GpuActorRolloutRefWorker", "GpuTrainingWorker")


def test_flash_attention_of_another_torch_is_none(tmp_path, machine):
    machine.flash = ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E")
    found = composed(model_of(tmp_path))
    assert attention(found.config) == ENGINE
    assert "does not load (flash_attn_2_cuda.so: undefined symbol" in said(found)[0]


@pytest.mark.parametrize("flash", [None, SimpleNamespace()])
def test_a_card_that_is_too_old_for_both_gets_the_attention_of_torch(tmp_path, machine, flash):
    machine.flash, machine.gpus = flash, {"Tesla T4": (7, 5), "NVIDIA A100": (8, 0)}
    found = composed(model_of(tmp_path))
    assert attention(found.config) == "sdpa"
    assert found.config.actor_rollout_ref.model.use_remove_padding  # the user's, written out
    assert "Tesla T4 has compute capability 7.5" in said(found)[0]


@pytest.mark.parametrize(
    ("kind", "settings", "expected", "reason"),
    [
        ("mistral", {"sliding_window": 32}, "sdpa", "sliding_window=32"),
        ("gemma2", {"head_dim": 32}, "eager", "attn_logit_softcapping"),
        ("qwen2", {"attention_dropout": 0.1}, "sdpa", "attention_dropout=0.1"),
        ("qwen2_moe", {"output_router_logits": True}, "sdpa", "output_router_logits"),
        ("qwen2", {"num_attention_heads": 8}, "sdpa", "heads of 8 elements"),
    ],
)
def test_models_that_our_engine_refuses_get_the_attention_of_torch(
    tmp_path, kind, settings, expected, reason
):
    path = model_of(tmp_path, kind, **settings)
    changes = documented(actor_rollout_ref__model__path=path, trainer__logger=["console"])
    del changes["actor_rollout_ref"]["model"]["use_remove_padding"]
    found = compose(changes, device="cuda")
    assert attention(found.config) == expected
    assert found.config.actor_rollout_ref.model.use_remove_padding is False
    (line,) = said(found)
    assert reason in line
    assert "flash-attn is not installed" in line


@pytest.mark.parametrize("chosen", ["sdpa", "eager", FLASH, "flex_attention"])
def test_what_the_user_sets_wins(tmp_path, chosen):
    changes = {f"actor_rollout_ref__model__{IMPLEMENTATION.replace('.', '__')}": chosen}
    found = composed(model_of(tmp_path), **changes)
    assert attention(found.config) == chosen
    assert said(found) == []
    assert not uses_engine(found.config)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_engine_may_be_asked_for(tmp_path, machine, device):
    """With flash-attn, and on a CPU, where it saves the padding, too."""
    machine.flash = SimpleNamespace()
    changes = {f"actor_rollout_ref__model__{IMPLEMENTATION.replace('.', '__')}": ENGINE}
    found = composed(model_of(tmp_path), device, **changes)
    assert attention(found.config) == ENGINE
    assert uses_engine(found.config)
    refused = model_of(tmp_path, "mistral", sliding_window=32)
    with pytest.raises(ValueError, match=r"agl_fast_tree': expected 'sdpa', as .*sliding_window"):
        composed(refused, device, **changes)


def test_level_tree_has_no_other(tmp_path):
    changes = {f"actor_rollout_ref__model__{IMPLEMENTATION.replace('.', '__')}": FLASH}
    found = composed(model_of(tmp_path), agentlightning__trace_aggregator__level="tree", **changes)
    assert attention(found.config) == ENGINE
    assert f"{ENGINE} in place of {FLASH}" in said(found)[0]


def test_a_critic_is_decided_with_its_own_model(tmp_path, monkeypatch):
    """verl would load it with flash attention, whatever it is told."""
    critic = model_of(tmp_path, "mistral", sliding_window=32)
    found = composed(model_of(tmp_path), algorithm__adv_estimator="gae", critic__model__path=critic)
    assert attention(found.config) == ENGINE
    assert attention(found.config, CRITIC) == "sdpa"
    assert found.config.critic.model.use_remove_padding is False
    assert len(said(found)) == 2
    monkeypatch.setattr(entrypoint, "get_device_name", lambda: "cuda")
    classes = entrypoint.worker_classes(found.config)
    names = [each.__name__ for each in classes]
    assert names == ["TreeActorRolloutRefWorker", "GpuTrainingWorker"]


def test_ulysses_needs_flash_attention(tmp_path, machine):
    changes = {"actor_rollout_ref__actor__ulysses_sequence_parallel_size": 2}
    with pytest.raises(ValueError, match=r"ulysses_sequence_parallel_size=2.*not installed"):
        composed(model_of(tmp_path), **changes)
    machine.flash = SimpleNamespace()
    assert attention(composed(model_of(tmp_path), **changes).config) is None


def test_a_model_that_is_not_here_is_left_to_the_engine(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert attention(composed("somebody/some-model").config) == ENGINE


def test_a_recorded_configuration_keeps_what_was_chosen(tmp_path, machine):
    """A replay takes the engine of the run, with flash-attn and on a CPU, too."""
    kept = differences(composed(model_of(tmp_path)).config)
    machine.flash = SimpleNamespace()
    for device in ("cuda", "cpu"):
        assert attention(compose(kept, device=device).config) == ENGINE


def test_cards_are_asked_without_starting_cuda(tmp_path, monkeypatch):
    """CUDA, once started in the driver, could not be used by forked runners."""
    monkeypatch.undo()
    program = tmp_path / "nvidia-smi"
    cards = ("NVIDIA H100 80GB HBM3, 9.0, 80994, 81559, 580.65", "Tesla T4, 7.5, [N/A], 1, 5")
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{card}'\n" for card in cards))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert config_attention.gpus() == {"NVIDIA H100 80GB HBM3": (9, 0)}
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed' \nexit 9\n")
    assert config_attention.gpus() == {}
