"""What trees would train wrongly is refused at the start, with the reason."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM
from verl.utils.config import omega_conf_to_dataclass

import support.verl_trainer_imports  # noqa: F401
from agl_fast.training import WorkerGroups
from agl_fast.training.step_rows import Rows
from agl_fast.training.worker_groups import require_tree_workers
from agl_fast.tree.ancestors import link
from agl_fast.tree.attention import NAME, Tree, tree_attention
from agl_fast.tree.refusals import require_tree_config, require_tree_model
from agl_fast.verl import preflight
from agl_fast.verl.config import compose
from support.invariance import tiny_model
from support.verl_settings import documented

# verl's, torch's and transformers' own.
pytestmark = pytest.mark.filterwarnings("ignore")

ACTOR = "actor_rollout_ref.actor"
TREE = {"level": "tree", "tree_max_tokens": 1024}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "olmo2", "phi3"])
def test_families_that_are_taken(family):
    require_tree_model(AutoConfig.for_model(family, **{"sliding_window": None}))


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("gemma3_text", {}, "layers of the kind 'sliding_attention'"),
        ("gpt_oss", {}, "layers of the kind 'sliding_attention'"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, "'sliding_attention'"),
        ("mistral", {}, "sliding_window=4096 in every layer"),
        ("qwen3_next", {}, "layers of the kind 'linear_attention'"),
        ("qwen3_5_text", {}, "layers of the kind 'linear_attention'"),
        (
            "lfm2",
            {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
            "layers of the kind 'conv'",
        ),
        ("llama4_text", {}, "layers of the kind 'chunked_attention'"),
        ("mamba2", {}, "recurrent layers"),
        ("recurrent_gemma", {}, "recurrent layers"),
        ("deepseek_v3", {}, "latent attention"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("qwen3_moe", {"output_router_logits": True}, "a MoE auxiliary loss"),
        ("qwen2_5_vl", {}, "M-RoPE"),
        ("cohere", {}, "logit_scale"),
        ("gemma2", {}, "final_logit_softcapping"),
        ("nanochat", {}, "final_logit_softcapping"),
        ("seed_oss", {}, "attention_dropout=0.1"),
        ("zamba2", {}, "recurrent layers"),
        ("bamba", {}, "layers of the kind 'mamba'"),
        ("stablelm", {}, "takes none of transformers' attention functions"),
        ("bert", {}, "attention to the tokens behind"),
        ("gemma3", {}, "images"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
            "rope_type='dynamic'",
        ),
    ],
)
def test_families_that_are_refused(family, settings, reason):
    model = AutoConfig.for_model(family, **settings)
    with pytest.raises(ValueError, match="expected a text model of full causal") as caught:
        require_tree_model(model)
    assert family in str(caught.value)
    assert reason in str(caught.value)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("refused"), 1)


def composed(model: Path, **changes: Any) -> Any:
    settings = documented(
        actor_rollout_ref__model__path=str(model), agentlightning__trace_aggregator=TREE
    )
    return compose(
        OmegaConf.merge(settings, OmegaConf.create(nested(changes))), device="cpu"
    ).config


def nested(changes: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in changes.items():
        *groups, name = key.split("__")
        group = tree
        for each in groups:
            group = group.setdefault(each, {})
        group[name] = value
    return tree


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("actor_rollout_ref.model.use_fused_kernels", True, "use_fused_kernels=True"),
        (f"{ACTOR}.ulysses_sequence_parallel_size", 2, "ulysses_sequence_parallel_size=2"),
        (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", 2, "Ulysses cuts a row"),
        (f"{ACTOR}.fsdp_config.pad_to_length", True, "pad_to_length=True"),
        (f"{ACTOR}.strategy", "megatron", "Megatron"),
        (
            "actor_rollout_ref.model.override_config.attention_dropout",
            0.1,
            "attention_dropout=0.1",
        ),
    ],
)
def test_settings_that_are_refused(model, key, value, reason):
    config = composed(model)
    OmegaConf.resolve(config)
    require_tree_config(config)
    OmegaConf.update(config, key, value, force_add=True)
    with pytest.raises(ValueError, match="level='tree'") as caught:
        require_tree_config(config)
    assert reason in str(caught.value)


def test_a_run_is_refused(model, monkeypatch):
    monkeypatch.setattr(preflight, "get_device_name", lambda: "cpu")
    config = composed(
        model,
        actor_rollout_ref__model__use_fused_kernels=True,
        data__max_prompt_length=50,
        data__max_response_length=50,
    )
    with pytest.raises(ValueError, match="use_fused_kernels=True"):
        preflight.check_run(config)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"algorithm__enable_rollout_level_advantage": False}, "at level 'tree'"),
        (
            {
                "actor_rollout_ref__actor__use_dynamic_bsz": True,
                "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 1000,
            },
            "at least agentlightning.trace_aggregator.tree_max_tokens=1024",
        ),
        (
            {
                "algorithm__adv_estimator": "gae",
                "critic__ppo_max_token_len_per_gpu": 2048,
                "critic__forward_max_token_len_per_gpu": 1000,
            },
            "critic.ppo_infer_max_token_len_per_gpu=1000: expected at least",
        ),
    ],
)
def test_combinations_that_are_refused(model, changes, expected):
    with pytest.raises(ValueError, match=expected):
        composed(model, **changes)


def test_a_critics_values_have_room_for_a_tree(model):
    """verl's own default, 32768, would end the run once a longer tree is there."""
    changes = {
        "agentlightning__trace_aggregator__tree_max_tokens": 50_000,
        "actor_rollout_ref__rollout__log_prob_max_token_len_per_gpu": 50_000,
        "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 50_000,
    }
    config = composed(
        model,
        algorithm__adv_estimator="gae",
        critic__ppo_max_token_len_per_gpu=50_000,
        **changes,
    )
    OmegaConf.resolve(config)
    critic = {name: value for name, value in config.critic.items() if name != "model"}
    assert omega_conf_to_dataclass(OmegaConf.create(critic)).ppo_infer_max_token_len_per_gpu == 5e4


@pytest.mark.parametrize(("tree_max_tokens", "n_lines"), [(1024, 0), (47, 1)])
def test_calls_that_are_too_long_to_be_trained_are_announced(model, tree_max_tokens, n_lines):
    settings = documented(
        actor_rollout_ref__model__path=str(model),
        agentlightning__trace_aggregator={"level": "tree", "tree_max_tokens": tree_max_tokens},
        data__max_prompt_length=32,
        data__max_response_length=16,
    )
    said = [line for line in compose(settings, device="cpu").lines if "tree_max_tokens" in line]
    assert len(said) == n_lines
    assert all("up to data.max_prompt_length + data.max_response_length = 48" in s for s in said)


class Workers:
    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)

    def trains_trees(self) -> list[bool]:
        return self.answers


def test_every_group_of_workers_is_asked():
    able = Workers(True, True)
    require_tree_workers(WorkerGroups(able, 2, reference=able, critic=able))
    for other in (Workers(True, False), SimpleNamespace()):
        for groups, name in (
            (WorkerGroups(other, 2), "actor"),
            (WorkerGroups(able, 2, reference=other), "reference"),
            (WorkerGroups(able, 2, critic=other), "critic"),
        ):
            with pytest.raises(RuntimeError, match=f"the workers of the {name} have another"):
                require_tree_workers(groups)


@pytest.mark.parametrize(
    ("mask", "positions", "expected"),
    [
        ([0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 2, 2], False),
        ([0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 2, 0], False),
        ([0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 2, 1], True),
        ([0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 0, 1], True),
        ([0, 1, 1, 1, 1, 1], [0, 0, 1, 2, 2, 3], True),
    ],
)
def test_a_row_with_branches_is_told_from_a_plain_one(mask, positions, expected):
    tensors = {"attention_mask": torch.tensor([mask]), "position_ids": torch.tensor([positions])}
    assert Rows(tensors, {}, []).has_branches is expected


def test_the_attention_refuses_what_it_would_ignore():
    values = torch.randn(1, 2, 3, 4)
    tree = Tree(link(torch.arange(3).numpy()), torch.device("cpu"))
    plain = {"query": values, "key": values, "value": values, "attention_mask": None}
    for asked in (
        {"attention_mask": values},
        {"sliding_window": 2},
        {"dropout": 0.1},
        {"softcap": 30.0},
        {"s_aux": values},
    ):
        with pytest.raises(ValueError, match=next(iter(asked))):
            tree_attention(torch.nn.Identity(), tree=tree, **(plain | asked))
    with pytest.raises(ValueError, match="no tree"):
        tree_attention(torch.nn.Identity(), **plain)


def test_a_mask_of_the_models_own_is_refused():
    """Doge computes one from values and hands it to every layer's attention."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = AutoConfig.for_model("doge", vocab_size=8, num_attention_heads=2, **sizes)
    with pytest.raises(ValueError, match="attention masks that it computes from values"):
        require_tree_model(config)
    model = AutoModelForCausalLM.from_config(config)
    model.set_attn_implementation(NAME)
    depths = torch.tensor([[0, 1, 2, 1]])
    tree = Tree(link(depths[0].numpy()), torch.device("cpu"))
    with pytest.raises(ValueError, match="DogeAttention attends with attention_mask"):
        model(torch.arange(4)[None], position_ids=depths, tree=tree)
