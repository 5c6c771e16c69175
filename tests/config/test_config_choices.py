"""What verl would say only after Ray has started, or never, is said at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu] or [verl]")

import support.verl_trainer_imports  # noqa: F401
from agl_fast.verl.config import compose
from agl_fast.verl.preflight import check_model
from support.verl_settings import documented

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl, vLLM and what they import

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROWS = "agentlightning.trace_aggregator"


def settings_with(key: str, value: object) -> dict[str, Any]:
    return documented(**{key.replace(".", "__"): value})


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        (f"{ROLLOUT}.top_p", 0.0, "a number above 0, at most 1"),
        (f"{ROLLOUT}.top_p", 1.5, "a number above 0, at most 1"),
        (f"{ROLLOUT}.val_kwargs.top_p", -1.0, "a number above 0, at most 1"),
        (f"{ACTOR}.policy_loss.loss_mode", "vanila", "cispo_per_rollout_mean"),
        (f"{ACTOR}.kl_loss_type", "k4", "low_var_kl"),
        ("trainer.logger", ["console", "wandbb"], "not 'wandbb'"),
        ("trainer.logger", "wandbb", "some of wandb"),
        ("trainer.resume_mode", "latest", "one of auto, disable, resume_path"),
        ("trainer.total_training_steps", 0, "at least 1"),
    ],
)
def test_a_value_that_nothing_knows_is_named(key: str, value: object, expected: str) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        compose(settings_with(key, value), device="cuda")
    assert str(caught.value).startswith(f"{key}={value!r}: expected ")
    assert expected in str(caught.value)


@pytest.mark.parametrize("value", ["10", 2.5, True])
def test_steps_are_whole_numbers(value: object) -> None:
    message = rf"trainer\.total_training_steps={value!r}: expected int or null, got "
    with pytest.raises(TypeError, match=message):
        compose(settings_with("trainer.total_training_steps", value), device="cuda")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{ROLLOUT}.top_p", 0.1),
        (f"{ACTOR}.policy_loss.loss_mode", "per_rollout_mean"),
        (f"{ACTOR}.kl_loss_type", "k3+"),
        ("trainer.logger", ["console", "tensorboard", "file"]),
        ("trainer.resume_mode", "disable"),
        ("trainer.total_training_steps", 1),
    ],
)
def test_what_is_known_is_taken(key: str, value: object) -> None:
    compose(settings_with(key, value), device="cuda")


def test_a_module_of_the_user_may_register_a_loss() -> None:
    settings = settings_with(f"{ACTOR}.policy_loss.loss_mode", "mine")
    settings["actor_rollout_ref"]["model"]["external_lib"] = "mine"
    compose(settings, device="cuda")


def test_a_hook_is_given_by_name() -> None:
    with pytest.raises(TypeError, match=r"agentlightning\.rollout_hook=<.*'module:function'"):
        compose(settings_with("agentlightning.rollout_hook", print), device="cuda")


@pytest.mark.parametrize("config", [None, [], "settings.yaml"])
def test_settings_are_a_mapping(config: Any) -> None:
    with pytest.raises(TypeError, match=r"config=.*: expected a mapping of settings, got "):
        compose(config, device="cuda")


def said_of(path: object, **rollout: object) -> list[str]:
    settings = settings_with(f"{MODEL}.path", path)
    settings["actor_rollout_ref"]["rollout"] |= rollout
    return check_model(compose(settings, device="cuda").config)


def test_a_model_is_needed() -> None:
    settings = documented()
    del settings["actor_rollout_ref"]["model"]["path"]
    with pytest.raises(ValueError, match=rf"{MODEL}\.path is not set: expected the model to tr"):
        check_model(compose(settings, device="cuda").config)


@pytest.mark.parametrize("path", ["/nowhere/model", "./model", "../model", "~/model", "empty"])
def test_a_folder_without_a_model(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=rf"{MODEL}\.path='{path}': expected a folder with a con"):
        said_of(path)


def test_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert said_of("Qwen/Qwen2.5-0.5B-Instruct") == []
    (tmp_path / "models").mkdir()
    (line,) = said_of("models/qwem")
    assert "models/qwem is no folder with a config.json, though models is one" in line


@pytest.mark.parametrize("nested", [False, True])
def test_servers_see_no_further_than_the_model(tmp_path: Path, nested: bool) -> None:
    positions = {"max_position_embeddings": 768}
    model = {"text_config": positions} if nested else positions
    (tmp_path / "config.json").write_text(json.dumps(model))
    assert said_of(tmp_path, max_model_len=768) == []
    assert said_of(tmp_path) == []
    with pytest.raises(ValueError, match=rf"{ROLLOUT}\.max_model_len=769: expected at most 768, "):
        said_of(tmp_path, max_model_len=769)
    positions["max_position_embeddings"] = 767
    (tmp_path / "config.json").write_text(json.dumps(model))
    with pytest.raises(ValueError, match=r"max_position_embeddings of .*=767: expected at least"):
        said_of(tmp_path)


@pytest.mark.parametrize(
    ("level", "context", "needed"),
    [
        ("transition", 767, "data.max_prompt_length + data.max_response_length = 768"),
        ("trajectory", 300, "trace_aggregator.trajectory_max_prompt_length + 1 = 301"),
        ("tree", 256, "data.max_response_length + 1 = 257"),
    ],
)
def test_servers_hold_what_the_limits_allow(level: str, context: int, needed: str) -> None:
    settings = settings_with(f"{ROLLOUT}.max_model_len", context)
    rows = {"level": level, "trajectory_max_prompt_length": 300}
    settings["agentlightning"] = {"trace_aggregator": rows}
    with pytest.raises(ValueError, match=rf"{ROLLOUT}\.max_model_len={context}: exp") as caught:
        compose(settings, device="cuda")
    assert f"{needed}, or smaller limits" in str(caught.value)
    settings["actor_rollout_ref"]["rollout"]["max_model_len"] += 1
    compose(settings, device="cuda")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        (f"{ROLLOUT}.max_num_batched_tokens", 100, "at least .*max_num_seqs=256"),
        (f"{ROLLOUT}.gpu_memory_utilization", 1.5, "a number above 0, at most 1"),
        (f"{ROLLOUT}.max_num_seqs", 0, "at least 1"),
        (f"{ACTOR}.optim.lr", -1e-6, "a finite number, at least 0"),
        (f"{ACTOR}.ppo_epochs", 0, "at least 1"),
        ("trainer.total_epochs", 0, "at least 1"),
        # What these would train: nothing, or the opposite.
        (f"{ACTOR}.optim.clip_grad", 0, "a number above 0, the largest norm"),
        (f"{ACTOR}.optim.clip_grad", -1.0, "a number above 0, the largest norm"),
        ("critic.optim.clip_grad", 0, "a number above 0, the largest norm"),
        (f"{ACTOR}.loss_scale_factor", -5, "at least 1"),
        (f"{ACTOR}.kl_loss_coef", -0.1, "a finite number, at least 0"),
        (f"{ACTOR}.entropy_coeff", float("inf"), "a finite number"),
        (f"{MODEL}.lora_alpha", 0, "a finite number above 0"),
        (f"{MODEL}.lora_rank", -1, "at least 0"),
        ("trainer.critic_warmup", 5, "0, as the run has no critic"),
        # What these would end: the first update, or every call.
        (f"{ACTOR}.clip_ratio_c", 1.0, "a finite number above 1"),
        (f"{ACTOR}.tau_pos", 0, "a finite number above 0"),
        (f"{ACTOR}.optim.lr_warmup_steps", -5, "at least 0, or -1"),
        (f"{ACTOR}.optim.lr_warmup_steps_ratio", 2.0, "a number from 0 to 1"),
        (f"{ACTOR}.ulysses_sequence_parallel_size", 0, "at least 1"),
        ("algorithm.gamma", 2.0, "a number from 0 to 1"),
        ("algorithm.lam", -0.5, "a number from 0 to 1"),
        ("algorithm.kl_ctrl.horizon", 0, "at least 1"),
        ("algorithm.kl_ctrl.target_kl", 0.0, "a finite number above 0"),
        (f"{ROLLOUT}.top_k", -5, "-1 or 0 for all tokens"),
        (f"{ROLLOUT}.val_kwargs.top_k", -7, "-1 or 0 for all tokens"),
        (f"{ROLLOUT}.val_kwargs.temperature", -1.0, "a finite number, at least 0"),
        ("agentlightning.trace_aggregator.trajectory_max_total_length", 1, "at least 2"),
    ],
)
def test_a_value_out_of_range_is_named(key: str, value: object, expected: str) -> None:
    with pytest.raises(ValueError, match=rf"{key}={value}: expected {expected}"):
        compose(settings_with(key, value), device="cuda")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("api_key", ""),
        ("api_key", " padded"),
        ("api_key", "a\nb"),
        ("api_key", "clé"),
        ("host", ""),
        ("advertise_host", "http://here"),
    ],
)
def test_what_no_request_can_hold(name: str, value: str) -> None:
    key = f"agentlightning.proxy.{name}"
    with pytest.raises(ValueError, match=r"expected (printable|a host)") as caught:
        compose(settings_with(key, value), device="cuda")
    assert str(caught.value).startswith(f"{key}={value!r}: expected ")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"betas": [2, 3]}, "Invalid beta parameter"),
        ({"betas": [0.9]}, "expected arguments of torch.optim.AdamW"),
        ({"optimizer": "LBFGS"}, "unexpected keyword argument 'weight_decay'"),
        ({"optimizer": "lr_scheduler"}, "expected a class of torch.optim"),
        ({"override_optimizer_config": {"foo": 1}}, "unexpected keyword argument 'foo'"),
        ({"optimizer_impl": "no_module.optim"}, "expected a module that can be imported"),
    ],
)
def test_an_optimizer_that_no_worker_can_make(changes: dict[str, Any], expected: str) -> None:
    settings = documented(**{f"{ACTOR}.optim.{k}".replace(".", "__"): changes[k] for k in changes})
    with pytest.raises(ValueError, match=expected) as caught:
        compose(settings, device="cuda")
    assert str(caught.value).startswith(f"{ACTOR}.optim.")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("agentlightning.runner_silent_seconds", 10.0, "healthy ones count as dead"),
        (f"{ROWS}.trajectory_max_total_length", 2048, "leaves no room for an answer"),
    ],
)
def test_limits_that_healthy_rollouts_exceed_are_said(key: str, value: object, said: str) -> None:
    settings = settings_with(key, value)
    settings["agentlightning"].setdefault("trace_aggregator", {})["level"] = "trajectory"
    assert [line for line in compose(settings, device="cuda").lines if said in line]
    settings["agentlightning"] = {"trace_aggregator": {"level": "trajectory"}}
    assert not [line for line in compose(settings, device="cuda").lines if said in line]


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.8), ("top_k", 20)])
def test_sampling_from_fewer_tokens_is_said_once(name: str, value: float) -> None:
    lines = compose(settings_with(f"{ROLLOUT}.{name}", value), device="cuda").lines
    assert len([line for line in lines if line.startswith(f"{ROLLOUT}.{name}={value}: ")]) == 1
    lines = compose(documented(), device="cuda").lines
    assert not [line for line in lines if "samples from fewer tokens" in line]
