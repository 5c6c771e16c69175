"""Dynamic batching and token limits are filled in where the user has set neither."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu] or [verl]")

from omegaconf import OmegaConf

from agl_fast.verl.config import compose, differences
from support.verl_settings import DOCUMENTED, changed

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl, vLLM and what they import

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REFERENCE = "actor_rollout_ref.ref"
LIMIT = f"{ACTOR}.ppo_max_token_len_per_gpu"
SWITCHES = (
    f"{ACTOR}.use_dynamic_bsz",
    f"{ROLLOUT}.log_prob_use_dynamic_bsz",
    f"{REFERENCE}.log_prob_use_dynamic_bsz",
)
MINIMAL: dict[str, Any] = {
    "data": {"train_batch_size": 4},
    "actor_rollout_ref": {
        "model": {"path": "some/model"},
        "rollout": {"n": 2},
        "actor": {"ppo_mini_batch_size": 4},
    },
}


@pytest.fixture(autouse=True)
def flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine for training: what a run without it does is tested elsewhere."""
    monkeypatch.setattr("agl_fast.verl.config.attention_choice.flash_attention_fault", lambda: None)


def composed(*, device: str = "cuda", **changes: Any) -> tuple[Any, str]:
    """The configuration, and the notices about its micro-batches."""
    made = compose(changed(MINIMAL, changes), device=device)
    about = ("no micro-batch size is set", "as a row may have")
    said = [line for line in made.lines if any(words in line for words in about)]
    assert len(said) <= len(about)
    return made.config, "".join(said)


def switches(config: Any) -> list[bool]:
    return [OmegaConf.select(config, key) for key in SWITCHES]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_least_that_a_user_sets_composes(device: str) -> None:
    config, said = composed(device=device, actor_rollout_ref__actor__use_kl_loss=True)
    assert switches(config) == [True, True, True]
    assert f"{ACTOR}.use_dynamic_bsz=true" in said
    assert OmegaConf.select(config, LIMIT) == 16384
    again = compose(differences(config), device=device)
    assert again.config == config


def test_a_reference_with_a_size_of_the_user_keeps_it() -> None:
    size = {"log_prob_micro_batch_size_per_gpu": 2}
    config, said = composed(actor_rollout_ref__ref=size)
    assert switches(config) == [True, True, False]
    assert f"{REFERENCE}." not in said
    config, _ = composed(actor_rollout_ref__ref__log_prob_use_dynamic_bsz=False)
    assert switches(config) == [True, True, False]


def test_the_actor_s_log_probs_are_cut_as_its_updates() -> None:
    size = {"log_prob_micro_batch_size_per_gpu": 2}
    config, _ = composed(actor_rollout_ref__rollout={"n": 2, **size})
    assert switches(config) == [True, True, True]
    for is_dynamic in (True, False):
        with pytest.raises(
            ValueError, match=rf"{ROLLOUT}.log_prob_use_dynamic_bsz={not is_dynamic}: expected"
        ):
            composed(
                actor_rollout_ref__actor__use_dynamic_bsz=is_dynamic,
                actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=2,
                actor_rollout_ref__rollout__log_prob_use_dynamic_bsz=not is_dynamic,
                actor_rollout_ref__rollout__log_prob_micro_batch_size_per_gpu=2,
            )


def test_nothing_is_filled_in_where_the_user_says_something() -> None:
    lines = compose(copy.deepcopy(DOCUMENTED), device="cuda").lines
    assert not [line for line in lines if "micro-batch" in line]
    config, said = composed(actor_rollout_ref__actor__use_dynamic_bsz=True)
    assert switches(config) == [True, True, True]
    assert said == ""
    with pytest.raises(ValueError, match="Please set at least one of"):
        composed(actor_rollout_ref__actor__use_dynamic_bsz=False)


@pytest.mark.parametrize(
    ("rows", "longest"),
    [
        ({"level": "transition"}, 20_300),
        ({"level": "trajectory", "trajectory_max_response_length": 30_000}, 32_048),
        ({"level": "trajectory", "trajectory_max_total_length": 9_000}, 16_384),
        ({"level": "tree", "tree_max_tokens": 20_000}, 20_000),
    ],
)
def test_a_micro_batch_holds_the_longest_row(rows: dict[str, Any], longest: int) -> None:
    data = {"train_batch_size": 4, "max_prompt_length": 20_000, "max_response_length": 300}
    changes = {"data": data, "agentlightning__trace_aggregator": rows}
    config, said = composed(**changes)
    assert OmegaConf.select(config, LIMIT) == longest
    assert OmegaConf.select(config, f"{ROLLOUT}.log_prob_max_token_len_per_gpu") == longest
    assert (f"{LIMIT}={longest}" in said) == (longest != 16_384)
    limit = {LIMIT.replace(".", "__"): 40_000}
    assert OmegaConf.select(composed(**changes, **limit)[0], LIMIT) == 40_000


def test_a_critic_has_the_same() -> None:
    config, _ = composed(algorithm__adv_estimator="gae")
    assert config.critic.use_dynamic_bsz is True
    sized = {"actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 2}
    sized["actor_rollout_ref__rollout__log_prob_micro_batch_size_per_gpu"] = 2
    config, said = composed(algorithm__adv_estimator="gae", **sized)
    assert switches(config)[:2] == [False, False]
    assert config.critic.use_dynamic_bsz is True
    assert said.startswith("critic.use_dynamic_bsz=true, as ")
    config, _ = composed(algorithm__adv_estimator="gae", critic__ppo_micro_batch_size_per_gpu=2)
    assert switches(config) == [True, True, True]
    assert config.critic.use_dynamic_bsz is False


LONG = {"level": "trajectory", "trajectory_max_prompt_length": 4096}
LONG["trajectory_max_response_length"] = 34_384


@pytest.mark.parametrize("written_out", [{}, {"actor_rollout_ref__actor__use_dynamic_bsz": True}])
def test_limits_that_the_user_has_not_set_are_raised(written_out: dict[str, Any]) -> None:
    grpo = {"algorithm__adv_estimator": "grpo"}
    config, said = composed(agentlightning__trace_aggregator=dict(LONG), **grpo, **written_out)
    for key in (LIMIT, f"{ROLLOUT}.log_prob_max_token_len_per_gpu"):
        assert OmegaConf.select(config, key) == 4096 + 34_384
    assert f"{LIMIT}=38480, as a row may have 38480 tokens" in said


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        (LIMIT, {"actor_rollout_ref__actor__use_dynamic_bsz": True}),
        (LIMIT, {}),
        (f"{ROLLOUT}.log_prob_max_token_len_per_gpu", {}),
        (
            f"{REFERENCE}.log_prob_max_token_len_per_gpu",
            {"actor_rollout_ref__actor__use_kl_loss": True},
        ),
        ("critic.ppo_max_token_len_per_gpu", {"algorithm__adv_estimator": "gae"}),
        ("critic.forward_max_token_len_per_gpu", {"algorithm__adv_estimator": "gae"}),
    ],
)
def test_limits_of_the_user_that_hold_no_row_are_refused(key: str, changes: dict[str, Any]) -> None:
    set_to = {key.replace(".", "__"): 16_000, "agentlightning__trace_aggregator": dict(LONG)}
    named = key.replace("forward_max", "ppo_infer_max")
    message = (
        rf"{named}=16000: expected at least .*trajectory_max_response_length = 38480, as a row"
    )
    with pytest.raises(ValueError, match=message):
        composed(**changes, **set_to)


def test_a_limit_of_a_part_that_does_not_run_may_be_small() -> None:
    small = {f"{REFERENCE}.log_prob_max_token_len_per_gpu".replace(".", "__"): 10}
    small["critic__ppo_max_token_len_per_gpu"] = 10
    config, _ = composed(algorithm__adv_estimator="grpo", **small)
    assert OmegaConf.select(config, f"{REFERENCE}.log_prob_max_token_len_per_gpu") == 10


def test_gpus_that_share_a_row_hold_a_part_of_it_each() -> None:
    shared = {"actor_rollout_ref__actor__ulysses_sequence_parallel_size": 4}
    shared["trainer__n_gpus_per_node"] = 4
    limit = {LIMIT.replace(".", "__"): 38_480 // 4}
    config, _ = composed(agentlightning__trace_aggregator=dict(LONG), **shared, **limit)
    assert OmegaConf.select(config, LIMIT) == 9620
    limit = {LIMIT.replace(".", "__"): 9619}
    with pytest.raises(ValueError, match=r"=9619: expected .*shared by ulysses_seq.*=4 GPUs"):
        composed(agentlightning__trace_aggregator=dict(LONG), **shared, **limit)


def test_the_servers_context_bounds_a_row() -> None:
    rollout = {"n": 2, "max_model_len": 8192}
    config, _ = composed(
        agentlightning__trace_aggregator=dict(LONG), actor_rollout_ref__rollout=rollout
    )
    assert OmegaConf.select(config, LIMIT) == 16_384


@pytest.mark.parametrize(
    ("vocabulary", "tokens"), [(512, 16_384), (151_936, 3533), (262_144, 2048)]
)
def test_logits_of_a_micro_batch_fit_beside_a_model(
    tmp_path: Path, vocabulary: int, tokens: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": vocabulary}))
    config, said = composed(actor_rollout_ref__model__path=str(tmp_path))
    assert OmegaConf.select(config, LIMIT) == tokens
    assert (f"and a token {vocabulary} logits" in said) == (tokens != 16_384)
    kept = {LIMIT.replace(".", "__"): 16_384}
    settings = changed(MINIMAL, {"actor_rollout_ref__model__path": str(tmp_path), **kept})
    made = compose(settings, device="cuda")
    assert OmegaConf.select(made.config, LIMIT) == 16_384
    large = [line for line in made.lines if "the logits of a micro-batch" in line]
    assert bool(large) == (vocabulary > 512)
    if vocabulary == 262_144:
        assert "up to 48 GiB" in large[0]
