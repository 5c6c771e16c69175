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

import torch
import transformers
from omegaconf import OmegaConf

import support.verl_trainer_imports  # noqa: F401
from agl_fast.tree.engine_name import ENGINE
from agl_fast.verl import entrypoint
from agl_fast.verl.config import Composed, compose, decide_with_model, differences
from agl_fast.verl.config import attention_choice as config_attention
from agl_fast.verl.config.attention_choice import ACTOR, CRITIC, IMPLEMENTATION, uses_engine
from support.verl_settings import changed, documented

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
    changes = {
        "actor_rollout_ref__actor__ulysses_sequence_parallel_size": 2,
        "trainer__n_gpus_per_node": 2,
    }
    with pytest.raises(ValueError, match=r"ulysses_sequence_parallel_size=2.*not installed"):
        composed(model_of(tmp_path), **changes)
    machine.flash = SimpleNamespace()
    assert attention(composed(model_of(tmp_path), **changes).config) is None


HUB_MODEL = "somebody/some-model"


class Hub:
    """Answers for `HUB_MODEL` in place of the Hugging Face hub.

    Attributes:
        model: its configuration; None: nothing can be had.
        asked: how often it was.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model: Any = None
        self.asked = 0
        load = config_attention.AutoConfig.from_pretrained

        def from_pretrained(path: str, *, local_files_only: bool, **options: Any) -> Any:
            if local_files_only or path != HUB_MODEL:
                return load(path, local_files_only=True, **options)
            self.asked += 1
            if self.model is None:
                raise OSError("there is no connection")
            return self.model

        monkeypatch.setattr(config_attention.AutoConfig, "from_pretrained", from_pretrained)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    return Hub(monkeypatch)


def open_for(**changes: Any) -> Composed:
    """Composed for a model that is not on this machine, whose padding the user leaves open."""
    settings = documented(
        actor_rollout_ref__model__path=HUB_MODEL, trainer__logger=["console"], **changes
    )
    del settings["actor_rollout_ref"]["model"]["use_remove_padding"]
    return compose(settings, device="cuda")


def test_a_model_that_is_not_here_is_left_open_and_the_hub_is_not_asked(hub):
    found = open_for()
    assert attention(found.config) is None
    (line,) = said(found)
    assert line == (
        f"{ACTOR}.{IMPLEMENTATION}: chosen when the run starts, as flash-attn is not installed and "
        f"{HUB_MODEL} is not on this machine"
    )
    assert "actor_rollout_ref.rollout.n" in found.open_keys
    assert hub.asked == 0


def test_a_model_that_is_here_leaves_nothing_open(tmp_path, hub):
    assert composed(model_of(tmp_path)).open_keys is None
    assert hub.asked == 0


@pytest.mark.parametrize(
    ("kind", "settings", "expected", "keeps_padding"),
    [
        ("qwen2", {"num_attention_heads": 2, "hidden_size": 64}, ENGINE, False),
        ("mistral", {"sliding_window": 32}, "sdpa", True),
        ("gemma2", {}, "eager", True),
    ],
)
def test_it_is_decided_once_the_model_can_be_asked(hub, kind, settings, expected, keeps_padding):
    found = open_for()
    hub.model = transformers.AutoConfig.for_model(kind, **settings)
    lines = decide_with_model(found.config, found.open_keys)
    assert attention(found.config) == expected
    assert found.config.actor_rollout_ref.model.use_remove_padding is not keeps_padding
    assert f"{ACTOR}.{IMPLEMENTATION}={expected}" in lines[0]
    assert decide_with_model(found.config, found.open_keys) == lines[1:]  # nothing else changes


def test_a_model_that_cannot_be_asked_is_left_to_the_engine(hub):
    """verl names it once it loads it."""
    found = open_for()
    decide_with_model(found.config, found.open_keys)
    assert hub.asked
    assert attention(found.config) == ENGINE


def test_what_the_user_asks_for_is_held_against_a_model_of_the_hub(hub):
    changes = {f"actor_rollout_ref__model__{IMPLEMENTATION.replace('.', '__')}": ENGINE}
    found = open_for(**changes)
    assert attention(found.config) == ENGINE
    hub.model = transformers.MistralConfig(sliding_window=32)
    with pytest.raises(ValueError, match=r"agl_fast_tree': expected 'sdpa', as .*sliding_window"):
        decide_with_model(found.config, found.open_keys)


MUCH = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "max_position_embeddings": 2**17,
    "sliding_window": 4096,
}
ROWS = {
    "actor_rollout_ref__actor__use_dynamic_bsz": True,
    "agentlightning__trace_aggregator": {
        "level": "trajectory",
        "trajectory_max_prompt_length": 2**14,
        "trajectory_max_response_length": 2**14,
    },
}


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        # A row of 2**15 tokens has 2**30 pairs: a byte of each in the mask, two in a layer's own.
        ("mistral", {}, "masks of a micro-batch of 1 row of 32768 tokens take 3.0 GiB"),
        (
            "mistral",
            {"actor_rollout_ref__model__enable_gradient_checkpointing": False},
            "masks of a micro-batch of 1 row of 32768 tokens take 9.0 GiB",  # of four layers
        ),
        (
            "mistral",
            {"actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 2**17},
            "masks of a micro-batch of 4 rows of 32768 tokens take 12.0 GiB",
        ),
        (
            "mistral",  # one row of all tokens
            {
                "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 2**16,
                "actor_rollout_ref__model__use_remove_padding": True,
            },
            "masks of a micro-batch of 1 row of 65536 tokens take 12.0 GiB",
        ),
        ("gemma2", {}, "scores of a micro-batch of 1 row of 32768 tokens take 64.0 GiB"),
    ],
)
def test_attention_of_torch_says_what_memory_it_takes(tmp_path, kind, changes, expected):
    path = model_of(tmp_path, kind, **MUCH)
    settings = documented(actor_rollout_ref__model__path=path, trainer__logger=["console"], **ROWS)
    for key in ("use_remove_padding", "enable_gradient_checkpointing"):
        del settings["actor_rollout_ref"]["model"][key]
    del settings["actor_rollout_ref"]["actor"]["ppo_micro_batch_size_per_gpu"]
    found = compose(changed(settings, changes), device="cuda")
    (line,) = [line for line in said(found) if "GiB" in line]
    assert line.startswith(f"{ACTOR}.{IMPLEMENTATION}={attention(found.config)}: attention ")
    assert expected in line


@pytest.mark.parametrize("n_heads", [1, 4])
@pytest.mark.parametrize("n_layers", [1, 3])
def test_scores_take_so_many_bytes_a_pair(tmp_path, n_heads, n_layers):
    """What autograd keeps of a model in bfloat16, by the size of its tensors."""
    width = 96
    config = transformers.AutoConfig.for_model(
        "gemma2",
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=16,
        attn_implementation="eager",
    )
    model = transformers.AutoModel.from_config(config, dtype=torch.bfloat16).train()
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-2:] == (width, width) and tensor.dim() >= 3:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = model(torch.zeros(1, width, dtype=torch.long))
    assert found.last_hidden_state.requires_grad
    of_pair = sum(kept.values()) / (n_heads * n_layers * width**2)
    assert of_pair == config_attention.SCORE_BYTES


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
