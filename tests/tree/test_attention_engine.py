"""Rows through the engines that a run on GPUs without flash-attn takes, against the plain actor's.

The configuration is composed for a GPU without flash-attn. Only what no CPU has is changed: the
strategy, precision and compilation of `cpu_defaults.yaml`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from omegaconf import OmegaConf

import agl_fast
from agl_fast.training.step_rows import Rows
from agl_fast.training.worker_groups import (
    FORWARD_KEYS,
    critic_values,
    forward_layout,
    laid_out_rows,
    policy_log_probs,
)
from agl_fast.verl.config import attention_choice as config_attention
from agl_fast.verl.config import compose
from agl_fast.verl.config.defaults import cpu_defaults
from agl_fast.verl.entrypoint import worker_classes
from agl_fast.verl.platform_cpu import log_probs
from agl_fast.verl.platform_cpu.log_probs import log_probs_of_labels, vectorize_log_probs
from support import engine_workers, invariance
from support.engine_workers import TEMPERATURE
from support.invariance import P, R
from support.verl_settings import changed

# verl's, torch's and transformers' own.
pytestmark = pytest.mark.filterwarnings("ignore")

IN_FLOAT32 = 5e-6
ATTENTION = ("attn_implementation", "use_remove_padding")


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    with engine_workers.one_rank():
        dist.init_process_group("gloo")
        yield


@pytest.fixture(autouse=True)
def _without_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        config_attention.importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "flash_attn" else find_spec(name, *rest),
    )
    monkeypatch.setattr(config_attention, "gpus", lambda: {"NVIDIA H100": (9, 0)})


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return invariance.tiny_model(tmp_path_factory.mktemp("qwen"), 3)


@pytest.fixture(scope="module")
def mistral(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that the engine for trees refuses: it attends to a window of 16 tokens."""
    folder = tmp_path_factory.mktemp("mistral")
    like = transformers.AutoConfig.from_pretrained(qwen)
    torch.manual_seed(4)
    config = transformers.MistralConfig(
        vocab_size=like.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=P + R,
        sliding_window=16,
        pad_token_id=like.pad_token_id,
        eos_token_id=like.eos_token_id,
    )
    transformers.MistralForCausalLM(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(qwen).save_pretrained(folder)
    return folder


def composed_for_a_gpu(model: Path, **changes: Any) -> Any:
    """The whole configuration, with what a CPU needs beside the attention."""
    settings = {
        "algorithm": {"adv_estimator": "grpo"},
        "data": {
            "train_batch_size": 6,
            "max_prompt_length": P + R,
            "max_response_length": R,
        },
        "actor_rollout_ref": {
            "model": {"path": str(model), "enable_gradient_checkpointing": False},
            "actor": {"ppo_mini_batch_size": 6, "optim": {"lr": 0.1, "optimizer": "SGD"}},
            "rollout": {"n": 2, "temperature": TEMPERATURE},
        },
        "agentlightning": {"trace_aggregator": {"trajectory_max_prompt_length": P + R}},
    }
    config = compose(changed(settings, changes), device="cuda").config
    for group in cpu_defaults():
        for key, value in group.set.items():
            if not key.endswith(ATTENTION):
                OmegaConf.update(config, key, value, force_add=True)
    OmegaConf.resolve(config)
    return config


@dataclass
class Computed:
    """Of the trained tokens, in the order of rows, and of all parameters."""

    log_probs: torch.Tensor
    entropies: torch.Tensor
    gradients: dict[str, torch.Tensor]


def rows_of(level: str) -> agl_fast.Batch:
    cut = invariance.Cut(level, 4)
    return invariance.cut_into_rows(cut)


def through_engine(config: Any, batch: agl_fast.Batch, worker_cls: type[Any]) -> Computed:
    torch.manual_seed(0)
    worker = engine_workers.engine_worker(config, worker_cls)
    rows = Rows.of(batch)
    found, _ = policy_log_probs(rows, engine_workers.worker_groups(worker), config)
    trained = batch.tensors["response_mask"].bool()
    values = found["old_log_probs"][trained], found["entropys"][trained]
    return Computed(*values, gradients_of(worker, rows))


def gradients_of(worker: Any, rows: Rows) -> dict[str, torch.Tensor]:
    """Of a sum of log-probs with a weight each."""
    from verl.utils import tensordict_utils as tu

    layout = forward_layout(rows, 1, None)
    laid_out = laid_out_rows(rows, layout, FORWARD_KEYS, temperature=TEMPERATURE, compute_loss=True)
    config = worker.engine_config
    tu.assign_non_tensor(
        laid_out,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=config.max_token_len_per_gpu,
        use_remove_padding=worker.engine.use_remove_padding,
        use_fused_kernels=False,
    )

    def loss(model_output: Any, data: Any, dp_group: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        from verl.workers.utils.padding import no_padding_2_padding

        mask = data["response_mask"]
        weights = torch.sin(data["responses"].float()) * mask
        return (no_padding_2_padding(model_output["log_probs"], data) * weights).sum(), {}

    with worker.engine.train_mode():
        worker.engine.optimizer_zero_grad()
        worker.engine.forward_backward_batch(laid_out, loss)
        named = worker.engine.module.named_parameters()
        return {
            name: each.grad.full_tensor().clone() for name, each in named if each.grad is not None
        }


def by_plain_model(model: Path, batch: agl_fast.Batch) -> Computed:
    """Row after row, by transformers, in float64."""
    module = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float64, attn_implementation="eager"
    )
    log_probs_found, entropies = [], []
    tensors = batch.tensors
    for row in range(len(batch)):
        real = tensors["attention_mask"][row].bool()
        ids = tensors["input_ids"][row][real][None]
        logits = module(ids).logits[0] / TEMPERATURE
        n_prompt = int(real[: tensors["prompts"].shape[1]].sum())
        trained = tensors["response_mask"][row].bool().nonzero()[:, 0]
        of_tokens = logits.log_softmax(dim=-1)[n_prompt - 1 + trained]
        tokens = tensors["responses"][row][trained]
        log_probs_found.append(of_tokens.gather(1, tokens[:, None])[:, 0])
        entropies.append(-(of_tokens.exp() * of_tokens).sum(dim=1))
    found = torch.cat(log_probs_found)
    tokens = tensors["responses"][tensors["response_mask"].bool()]
    (found * torch.sin(tokens.float())).sum().backward()
    gradients = {name: each.grad for name, each in module.named_parameters()}
    return Computed(found.detach(), torch.cat(entropies).detach(), gradients)


def assert_same(found: Computed, expected: Computed) -> None:
    assert (found.log_probs - expected.log_probs).abs().max() < IN_FLOAT32
    assert (found.entropies - expected.entropies).abs().max() < 2 * IN_FLOAT32
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        apart = (found.gradients[name] - gradient).norm() / gradient.norm()
        assert apart < IN_FLOAT32, name


@pytest.mark.parametrize("level", ["transition", "trajectory"])
def test_plain_rows_through_the_engine_for_trees(qwen, level):
    config = composed_for_a_gpu(qwen, agentlightning__trace_aggregator__level=level)
    worker_cls = worker_classes(config)[0].actor_worker_cls
    assert worker_cls.__name__ == "CpuTreeTrainingWorker"
    batch = rows_of(level)
    assert_same(through_engine(config, batch, worker_cls), by_plain_model(qwen, batch))


@pytest.mark.parametrize("remove_padding", [False, True])
def test_a_refused_model_through_the_attention_of_torch(mistral, remove_padding, monkeypatch):
    """With padding, as it is chosen, and without, as a user may ask for it."""
    changes = {"actor_rollout_ref__model__use_remove_padding": True} if remove_padding else {}
    config = composed_for_a_gpu(
        mistral, agentlightning__trace_aggregator__level="trajectory", **changes
    )
    model = config.actor_rollout_ref.model
    assert model.override_config.attn_implementation == "sdpa"
    assert model.use_remove_padding is remove_padding
    worker_cls = worker_classes(config)[0].actor_worker_cls
    assert worker_cls.__name__ == "CpuTrainingWorker"
    calls = count_calls(monkeypatch)
    batch = rows_of("trajectory")
    assert_same(through_engine(config, batch, worker_cls), by_plain_model(mistral, batch))
    assert calls["rows"] == 0


def count_calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Of one-dimensional softmax, which verl takes of each token."""
    calls = {"rows": 0}
    for owner, name in ((torch, "logsumexp"), (torch.nn.functional, "log_softmax")):
        real = getattr(owner, name)

        def counting(values: torch.Tensor, *rest: Any, real: Any = real, **named: Any) -> Any:
            calls["rows"] += values.dim() == 1
            return real(values, *rest, **named)

        monkeypatch.setattr(owner, name, counting)
    return calls


def test_a_critic_without_flash_attention(qwen, mistral):
    """verl asks for flash_attention_2 whatever is configured."""
    batch = rows_of("trajectory")
    rows = Rows.of(batch)
    for model, expected in ((qwen, "CpuTreeTrainingWorker"), (mistral, "CpuTrainingWorker")):
        config = composed_for_a_gpu(
            model,
            algorithm__adv_estimator="gae",
            agentlightning__trace_aggregator__level="trajectory",
        )
        worker_cls = worker_classes(config)[1]
        assert worker_cls.__name__ == expected
        torch.manual_seed(7)  # the head is new
        worker = engine_workers.critic_worker(config, worker_cls)
        group = engine_workers.worker_groups(None, critic=worker)
        found = critic_values(rows, group, config)["values"]
        trained = batch.tensors["response_mask"].bool()
        assert (
            found[trained] - engine_workers.plain_values(worker, model, batch)
        ).abs().max() < IN_FLOAT32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [2**26, 100])
def test_log_probs_of_all_tokens_at_once(dtype, at_once, monkeypatch):
    monkeypatch.setattr(log_probs, "LOGITS_AT_ONCE", at_once)
    torch.manual_seed(0)
    logits = (torch.randn(3, 50, 37) * 8).to(dtype).requires_grad_()
    labels = torch.randint(0, 37, (3, 50))
    weights = torch.randn(3, 50, dtype=torch.float64)
    found = log_probs_of_labels(logits, labels)
    exact = logits.detach().double().requires_grad_()
    expected = exact.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    tolerance = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 5e-6}[dtype]
    assert (found - expected).abs().max() < tolerance
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    of_logits = {torch.bfloat16: 2**-8}.get(dtype, tolerance)
    assert logits.grad.dtype == dtype
    assert torch.allclose(logits.grad.double(), exact.grad, rtol=of_logits, atol=of_logits)


def test_verl_takes_no_token_by_itself(monkeypatch):
    from verl.utils import torch_functional

    monkeypatch.setattr(torch_functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", False)
    labels = torch.randint(0, 64, (512,))
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.randn(512, 64).to(dtype)
        expected = torch_functional.logprobs_from_logits(logits.float(), labels)
        vectorize_log_probs()
        calls = count_calls(monkeypatch)
        found = torch_functional.logprobs_from_logits(logits, labels)
        assert calls["rows"] == 0
        assert (found - expected).abs().max() < IN_FLOAT32
