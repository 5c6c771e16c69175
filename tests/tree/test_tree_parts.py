"""What else learns from trees through verl's engine: a critic, LoRA adapters, a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from transformers import AutoModelForTokenClassification

from agl_fast.tree.tree_workers import CpuTreeTrainingWorker
from support import engine_workers, invariance
from support.invariance import Cut, Learned, flat, moved

# verl's, torch's and transformers' own.
pytestmark = pytest.mark.filterwarnings("ignore")

IN_FLOAT32 = 1e-6
CALLS = Cut("transition", 4, branched=True)
TREES = Cut("tree", 6, branched=True, shuffled=True, tree_max_tokens=60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return invariance.tiny_model(tmp_path_factory.mktemp("parts"), 3)


@pytest.fixture(scope="module")
def _one_rank() -> Iterator[None]:
    with engine_workers.one_rank():
        dist.init_process_group("gloo")
        yield


def learned(cut: Cut, config: Any, *, with_critic: bool) -> Learned:
    """Actor, and critic if there is one, by engines of their own."""
    torch.manual_seed(0)  # of adapters
    worker_cls = CpuTreeTrainingWorker if cut.level == "tree" else None
    config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu = 240
    parts = [engine_workers.engine_worker(config, worker_cls)]
    if with_critic:
        parts.append(engine_workers.critic_worker(config, worker_cls))
    with torch.no_grad():  # so that the actor is not its base from the start
        for name, weight in parts[0].engine.module.named_parameters():
            if "lora_B" in name:
                weight.fill_(0.02)
    before = [parameters(part) for part in parts]
    critic = parts[1] if with_critic else None
    workers = engine_workers.worker_groups(parts[0], parts[0], critic)
    if config.actor_rollout_ref.model.lora_rank:
        workers = replace(workers, reference_is_base_of_actor=True)
    advantages = invariance.learn(cut, workers, config)
    after = [moved(*each) for each in zip(before, map(parameters, parts), strict=True)]
    return Learned(advantages, torch.cat(after))


def parameters(worker: Any) -> torch.Tensor:
    """Those that learn; of adapters, the half that is not drawn."""
    named = worker.engine.module.named_parameters()
    return flat(
        each.full_tensor() for name, each in named if each.requires_grad and "lora_A" not in name
    )


def apart(first: Learned, second: Learned) -> tuple[float, float]:
    """Advantages, against the largest, and parameters."""
    largest = max(abs(a) for a in first.advantages.values())
    of_advantages = max(abs(second.advantages[key] - a) for key, a in first.advantages.items())
    of_parameters = (first.parameters - second.parameters).norm() / first.parameters.norm()
    return of_advantages / largest, float(of_parameters)


def without_flash_attention(local_path, torch_dtype, model_config, trust_remote_code):
    torch.manual_seed(0)  # the head is new
    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, attn_implementation="sdpa"
    )


@pytest.mark.usefixtures("_one_rank")
def test_a_critic(model, monkeypatch):
    monkeypatch.setattr("verl.utils.model.load_valuehead_model", without_flash_attention)
    config = invariance.configured(model)
    config.algorithm.adv_estimator = "gae"
    settings = {
        "enable": True,
        "strategy": "fsdp2",
        "fsdp": {"strategy": "fsdp2", "mixed_precision": {"param_dtype": "fp32"}},
        "model": {"path": str(model), "use_remove_padding": False},
        "optim": {"lr": 0.1, "optimizer": "SGD", "weight_decay": 0.0, "clip_grad": 1e9},
    }
    config.critic = OmegaConf.merge(config.critic, settings)
    expected, found = (learned(cut, config, with_critic=True) for cut in (CALLS, TREES))
    assert max(apart(expected, found)) < IN_FLOAT32


@pytest.mark.usefixtures("_one_rank")
def test_lora(model):
    """The reference, which weighs in the loss, is the actor without its adapters."""
    config = invariance.configured(model, kl_loss_coef=1.0)
    config.actor_rollout_ref.model.lora_rank = 4
    config.actor_rollout_ref.model.lora_alpha = 8
    config.actor_rollout_ref.model.target_modules = "all-linear"
    expected, found = (learned(cut, config, with_critic=False) for cut in (CALLS, TREES))
    assert max(apart(expected, found)) < IN_FLOAT32


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("estimator", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_baselines_of_tokens(model, estimator):
    """From Σ p² of the logits at parents."""
    config = invariance.configured(model, calculate_sum_pi_squared=True)
    config.actor_rollout_ref.actor.optim.lr = 1.0
    config.algorithm.adv_estimator = estimator
    expected, found = (learned(cut, config, with_critic=False) for cut in (CALLS, TREES))
    assert max(apart(expected, found)) < IN_FLOAT32


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("to_trees", [True, False])
def test_a_checkpoint_of_another_level(model, tmp_path, to_trees):
    """A run may go on at level tree, or leave it; what it saves is a plain model."""
    classes = (None, CpuTreeTrainingWorker) if to_trees else (CpuTreeTrainingWorker, None)
    config = invariance.configured(model)
    saved, loaded = (engine_workers.engine_worker(config, each) for each in classes)
    with torch.no_grad():
        for weight in saved.engine.module.parameters():
            weight.add_(0.01)
    assert (parameters(saved) - parameters(loaded)).norm() > 0.1
    saved.save_checkpoint(str(tmp_path / "actor"), global_step=3)
    loaded.load_checkpoint(str(tmp_path / "actor"))
    assert torch.equal(parameters(saved), parameters(loaded))
    told = (tmp_path / "actor" / "huggingface" / "config.json").read_text()
    assert "agl_fast" not in told
