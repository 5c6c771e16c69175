"""Every key of verl's composed configuration is honoured, mapped, refused or announced."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu] or [verl]")

import verl

from agl_fast.verl.config import compose
from agl_fast.verl.config.composition import _resolved_defaults
from agl_fast.verl.config.effects import check_effects, fate_of, move_values, verl_keys
from agl_fast.verl.config.user_settings import leaves
from support.verl_settings import documented

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl, vLLM and what they import

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
ALL_PARTS = ("critic", "reference")
KEYS = [
    (key, value)
    for key, value in leaves(_resolved_defaults())
    if not key.startswith("agentlightning.") and not key.endswith("_target_")
]


def test_every_key_of_the_installed_verl_is_classified() -> None:
    assert len(KEYS) > 800
    assert [key for key, _ in KEYS if fate_of(key) is None] == []


def test_every_pattern_decides_a_key() -> None:
    decided: dict[str, int] = {}
    for key, _ in KEYS:
        entry = fate_of(key)
        assert entry is not None
        for pattern in entry.keys:
            decided[pattern] = decided.get(pattern, 0) + (entry.closeness(key) >= 0)
    patterns = {pattern for entry in verl_keys() for pattern in entry.keys}
    # Of keys that verl's defaults do not list.
    assert {pattern for pattern in patterns if not decided.get(pattern)} <= {
        "actor_rollout_ref.*.optim.total_training_steps"
    }


def test_what_is_refused_or_unused_says_why_and_what_moves_goes_to_a_key() -> None:
    known = {key for key, _ in KEYS}
    for entry in verl_keys():
        assert entry.fate in ("honoured", "mapped", "refused", "unused"), entry
        assert (entry.why is not None) == (entry.fate in ("refused", "unused")), entry
        assert entry.to is None or (entry.fate == "mapped" and entry.to in known), entry
        assert entry.part is None or entry.fate == "honoured", entry


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("algorithm.use_pf_ppo", True, "resamples rows"),
        ("model_engine", "megatron", "FSDP"),
        ("data.gen_batch_size", 4, "data.train_batch_size"),
        (f"{ROLLOUT}.disaggregation.enabled", True, "whole servers"),
        (f"{ROLLOUT}.logprobs_mode", "raw_logprobs", "sampled from"),
        (f"{ACTOR}.strategy", "megatron", "expected 'fsdp' or 'fsdp2'"),
        (f"{ACTOR}.ppo_micro_batch_size", 4, "ppo_micro_batch_size_per_gpu"),
        ("actor_rollout_ref.model.lora.rank", 8, "lora_rank"),
        ("distillation.enabled", True, "no teacher"),
        ("skip.async_rollout.enable", True, "the agents roll out"),
    ],
)
def test_a_refused_key_says_what_to_do(key: str, value: object, expected: str) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        check_effects({key: value}, dict(KEYS), ALL_PARTS)
    assert str(caught.value).startswith(f"{key}={value!r}: expected ")
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.log_val_generations", 8),
        ("trainer.esi_redundant_time", 60),
        ("trainer.balance_batch", False),
        ("data.filter_overlong_prompts", True),
        ("data.truncation", "left"),
        (f"{ROLLOUT}.ignore_eos", True),
        (f"{ROLLOUT}.multi_turn.enable", True),
        (f"{ROLLOUT}.agent.num_workers", 8),
        (f"{ROLLOUT}.trace.backend", "mlflow"),
        (f"{ACTOR}.freeze_vision_tower", True),
        ("actor_rollout_ref.model.lora.dropout", 0.1),
        ("actor_rollout_ref.nccl_timeout", 60),
        ("global_profiler.profile_continuous_steps", True),
        ("reward.custom_reward_function.path", "reward.py"),
        ("transfer_queue.enable", True),
        ("trainer.v1.trainer_mode", "separate_async"),
    ],
)
def test_a_key_without_effect_is_announced(key: str, value: object) -> None:
    (line,) = check_effects({key: value}, dict(KEYS), ALL_PARTS)
    assert line.startswith(f"without effect: {key}={value!r} (")


@pytest.mark.parametrize(
    ("key", "value", "reader", "places"),
    [
        (f"{ROLLOUT}.moe_load_balance_metrics_interval", 5, "V1 trainer", ["trainer/ppo/v1"]),
        (f"{ROLLOUT}.multi_stage_wake_up", True, "SGLang", []),
        (
            f"{ACTOR}.fsdp_config.turbo_config.distributed.tensor_parallel_size",
            2,
            "fsdp_turbo",
            ["workers/engine/fsdp/fsdp_turbo_impl.py"],
        ),
    ],
)
def test_the_code_of_verl_reads_a_key_only_where_its_line_says(
    key: str, value: object, reader: str, places: list[str]
) -> None:
    (line,) = check_effects({key: value}, dict(KEYS), ALL_PARTS)
    assert reader in line
    name = "turbo_config" if "turbo_config" in key else key.rpartition(".")[2]
    root = Path(verl.__file__).parent
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if re.search(rf"\b{name}\b", path.read_text())
    }
    declared = {path for path in found if path.startswith("workers/config/")}
    assert len(declared) == 1
    readers = found - declared
    assert bool(readers) == bool(places)
    assert all(any(path.startswith(place) for place in places) for path in readers)


def test_keys_of_one_reason_share_a_line_and_defaults_have_none() -> None:
    set_to = {"data.prompt_key": "q", "data.image_key": "i", "trainer.nnodes": 2}
    (line,) = check_effects(set_to, dict(KEYS), ALL_PARTS)
    assert line.startswith("without effect: data.prompt_key='q', data.image_key='i' (")
    assert check_effects(dict(KEYS), dict(KEYS), ALL_PARTS) == []


def test_parts_that_the_run_does_not_have() -> None:
    settings = {"critic.optim.lr": 1.0, "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True}
    assert check_effects(settings, dict(KEYS), ALL_PARTS) == []
    lines = check_effects(settings, dict(KEYS), ())
    assert [line.partition(" (")[2] for line in lines] == [
        "the run has no critic)",
        "no KL term uses the reference policy)",
    ]


def test_the_gradient_s_limit_reaches_the_optimizer() -> None:
    old, new = f"{ACTOR}.grad_clip", f"{ACTOR}.optim.clip_grad"
    assert move_values({old: 0.5})[0] == {old: 0.5, new: 0.5}
    assert move_values({old: 0.5, new: 2.0})[0] == {old: 0.5, new: 2.0}
    composed = compose(documented(actor_rollout_ref__actor__grad_clip=0.5), device="cuda")
    assert composed.config.actor_rollout_ref.actor.optim.clip_grad == 0.5
    assert [line for line in composed.lines if line.startswith(f"{new}=0.5, as {old} says")]


def test_a_composed_configuration_says_it() -> None:
    changes: dict[str, Any] = {"trainer__log_val_generations": 8}
    lines = compose(documented(**changes), device="cuda").lines
    assert [line for line in lines if "trainer.log_val_generations=8" in line]
    with pytest.raises(ValueError, match=r"use_pf_ppo=True: expected False, as it resamples rows"):
        compose(documented(algorithm__use_pf_ppo=True), device="cuda")
