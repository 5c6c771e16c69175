"""What else learns from trees through verl's engine: a critic, LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from transformers import AutoModelForTokenClassification

import engine_workers
import invariance
from agl_fast.verl.tree.workers import CpuTreeTrainingWorker
from invariance import Cut, Learned, flat, moved

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
    before = [parameters(part) for part in parts]
    critic = parts[1] if with_critic else None
    workers = engine_workers.worker_groups(parts[0], parts[0], critic)
    advantages = invariance.learn(cut, workers, config)
    after = [moved(*each) for each in zip(before, map(parameters, parts), strict=True)]
    return Learned(advantages, torch.cat(after))


def parameters(worker: Any) -> torch.Tensor:
    """Those that learn; of adapters, the half that begins at 0."""
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
    config = invariance.configured(model)
    config.actor_rollout_ref.model.lora_rank = 4
    config.actor_rollout_ref.model.lora_alpha = 8
    config.actor_rollout_ref.model.target_modules = "all-linear"
    expected, found = (learned(cut, config, with_critic=False) for cut in (CALLS, TREES))
    assert max(apart(expected, found)) < IN_FLOAT32
