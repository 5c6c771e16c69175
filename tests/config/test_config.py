"""verl's defaults, agl_fast's and the user's settings become one checked configuration."""

from __future__ import annotations

import copy
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("verl", reason="needs the extra [cpu] or [verl]")

from omegaconf import OmegaConf

from agl_fast.verl.config import compose
from agl_fast.verl.config.defaults import BUCKET, cpu_defaults
from agl_fast.verl.config.key_checks import check_keys
from agl_fast.verl.config.servers import ENGINE_KWARGS, tool_options
from agl_fast.verl.config.user_settings import leaves
from agl_fast.verl.supervision.load_errors import ReportsLoadErrors
from support.verl_settings import DOCUMENTED, documented

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl, vLLM and what they import

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"


def value_of(config: Any, key: str) -> Any:
    return OmegaConf.select(config, key)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_documented_example_composes(device: str) -> None:
    settings = copy.deepcopy(DOCUMENTED)
    config = compose(settings, device=device).config
    assert settings == DOCUMENTED
    replaced = {f"{ACTOR}.fsdp_config.param_offload", f"{ACTOR}.fsdp_config.optimizer_offload"}
    for key, value in leaves(DOCUMENTED):
        wanted = False if device == "cpu" and key in replaced else value
        assert value_of(config, key) == wanted, key
    assert config.trainer.use_v1 is False
    assert config.trainer.device == device
    assert config.agentlightning.trace_aggregator.level == "transition"


@pytest.mark.parametrize(
    ("device", "extension"),
    [
        ("cpu", "agl_fast.verl.platform_cpu.vllm_extension.CpuWorkerExtension"),
        ("cuda", "agl_fast.verl.vllm_extension.WorkerExtension"),
    ],
)
def test_no_process_that_only_waits_and_servers_that_report(device: str, extension: str) -> None:
    config = compose(DOCUMENTED, device=device).config
    assert config.actor_rollout_ref.rollout.agent.num_workers == 0
    assert config.reward.num_workers == 0
    assert config.data.dataloader_num_workers == 0
    assert value_of(config, f"{ENGINE_KWARGS}.worker_extension_cls") == extension
    module, _, name = extension.rpartition(".")
    assert issubclass(getattr(import_module(module), name), ReportsLoadErrors)


def test_cuda_gets_none_of_what_a_cpu_needs() -> None:
    composed = compose(DOCUMENTED, device="cuda")
    assert composed.config.actor_rollout_ref.actor.strategy == "fsdp"
    assert composed.config.actor_rollout_ref.rollout.dtype == "bfloat16"
    assert not [line for line in composed.lines if "CPU" in line]


def test_cpu_gets_what_it_needs_and_says_so() -> None:
    composed = compose(documented(actor_rollout_ref__actor__use_kl_loss=True), device="cpu")
    config, said = composed.config, "\n".join(composed.lines)
    for group in cpu_defaults():
        for key, value in group.set.items():
            if key.startswith("critic.") or key in dict(leaves(DOCUMENTED)):
                continue
            wanted = 1 if key.endswith("num_gpus") else value
            assert value_of(config, key) == wanted, key
    assert said.count("on this CPU") == 1  # one notice for all of them
    assert f"{ROLLOUT}.dtype=float32" in said
    assert f"{ACTOR}.fsdp_config.param_offload=False in place of True" in said
    assert "in host memory already" in said
    assert "critic." not in said


def test_cpu_keeps_what_the_user_has_set() -> None:
    settings = documented(
        actor_rollout_ref__rollout__dtype="bfloat16",
        actor_rollout_ref__rollout__enforce_eager=False,
        ray_kwargs={"ray_init": {"num_cpus": 40}},
        data__dataloader_num_workers=2,
    )
    composed = compose(settings, device="cpu")
    assert composed.config.actor_rollout_ref.rollout.dtype == "bfloat16"
    assert composed.config.actor_rollout_ref.rollout.enforce_eager is False
    assert composed.config.actor_rollout_ref.rollout.gpu_memory_utilization == 0.6
    assert composed.config.ray_kwargs.ray_init.num_cpus == 40
    assert composed.config.data.dataloader_num_workers == 2
    assert "dtype" not in " ".join(composed.lines).replace("param_dtype", "")


def test_the_largest_weight_fits_into_a_bucket_of_the_sync(tmp_path: Path) -> None:
    weights = {"small": torch.zeros(3), "large": torch.zeros(5_000_000, dtype=torch.bfloat16)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    composed = compose(documented(actor_rollout_ref__model__path=str(tmp_path)), device="cpu")
    assert value_of(composed.config, BUCKET) == 20  # 5e6 numbers of 4 bytes
    assert [line for line in composed.lines if f"{BUCKET}=20" in line]
    small = {BUCKET.replace(".", "__"): 19}
    with pytest.raises(ValueError, match=f"{BUCKET}=19: expected at least 20"):
        compose(documented(actor_rollout_ref__model__path=str(tmp_path), **small), device="cpu")
    assert value_of(compose(DOCUMENTED, device="cpu").config, BUCKET) == 16


def test_cpu_keeps_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    config = compose(DOCUMENTED, device="cpu").config
    assert "env_vars" not in config.ray_kwargs.ray_init.runtime_env


def test_critic_on_a_cpu_is_filled_in_where_there_is_one() -> None:
    settings = documented(
        algorithm__adv_estimator="gae", critic={"ppo_micro_batch_size_per_gpu": 4}
    )
    config = compose(settings, device="cpu").config
    assert config.critic.enable is True
    assert config.critic.strategy == "fsdp2"
    assert config.critic.fsdp.mixed_precision.param_dtype == "fp32"
    assert config.critic.model.path == "some/model"
    assert compose(DOCUMENTED, device="cpu").config.critic.enable is False


@pytest.mark.parametrize(
    ("key", "value"), [("trainer.device", "cuda"), (f"{ACTOR}.strategy", "fsdp")]
)
def test_cpu_refuses_what_cannot_work(key: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{key}='{value}': expected '(cpu|fsdp2)', as"):
        compose(documented(**{key.replace(".", "__"): value}), device="cpu")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("trainer.total_epochs", "2", "expected int, got str"),
        ("trainer.total_epochs", 2.5, "expected int, got float"),
        ("trainer.total_epochs", None, "expected int, got null"),
        ("trainer.val_before_train", 1, "expected true or false, got int"),
        ("trainer.logger", 3, "expected a list, got int"),
        ("trainer", 5, "expected a mapping, got int"),
        ("data.train_batch_size", True, "expected int, got true or false"),
        (f"{ACTOR}.optim.lr", "1e-6", "expected float, got str"),
        (f"{ACTOR}.fsdp_config", 3, "expected a mapping, got int"),
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu", "4", "expected int or null, got str"),
        (f"{ROLLOUT}.n", [4], "expected int, got a list"),
        (f"{ROLLOUT}.multi_turn.format", {"a": 1}, "expected str, got a mapping"),
        ("algorithm.rollout_correction.rollout_is_threshold", [], "expected str or float"),
        ("agentlightning.llm_timeout_seconds", "60", "expected float, got str"),
        ("agentlightning.proxy.port", "80", "expected int or null, got str"),
        ("agentlightning.trace_aggregator", 7, "expected a mapping, got int"),
    ],
)
def test_wrong_type_is_named(key: str, value: object, expected: str) -> None:
    with pytest.raises(TypeError) as caught:
        compose(documented(**{key.replace(".", "__"): value}), device="cuda")
    message = str(caught.value)
    assert message.startswith(f"{key}=")
    assert repr(value) in message
    assert expected in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.logger", "console"),
        ("data.train_files", ["a.parquet", "b.parquet"]),
        (f"{ROLLOUT}.top_p", 1),
        (f"{ROLLOUT}.max_model_len", None),
        (f"{ACTOR}.optim.betas", [0.9, 0.95]),
        ("actor_rollout_ref.model.target_modules", ["q_proj"]),
        ("actor_rollout_ref.model.exclude_modules", ["lm_head"]),
        ("algorithm.rollout_correction.rollout_is_threshold", "0.5_5.0"),
        (f"{ROLLOUT}.engine_kwargs.vllm.block_size", 16),
        ("actor_rollout_ref.model.override_config.anything", {"at": ["all"]}),
        ("actor_rollout_ref.model.path", Path("a/model")),
        ("trainer.experiment_name", "${trainer.project_name}"),
        ("trainer.remove_previous_ckpt_in_save", True),
        ("data.apply_chat_template_kwargs", {"enable_thinking": False}),
        ("ray_kwargs.ray_init.address", "auto"),
        (f"{ACTOR}.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap", ["Layer"]),
    ],
)
def test_right_types_and_new_keys_are_taken(key: str, value: object) -> None:
    composed = compose(documented(**{key.replace(".", "__"): value}), device="cuda")
    wanted = "a project" if isinstance(value, str) and value.startswith("${") else value
    wanted = str(value) if isinstance(value, Path) else wanted
    assert value_of(composed.config, key) == wanted
    assert not [line for line in composed.lines if "new key" in line]


def test_key_that_verl_has_no_place_for_is_refused() -> None:
    settings = documented(actor_rollout_ref__actor__clip_ratio_hi=0.3)
    with pytest.raises(ValueError, match=r"actor\.clip_ratio_hi=0\.3: .*did you mean clip_ratio_h"):
        compose(settings, device="cuda")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("data.train_batch_size", 0, "at least 1"),
        (f"{ROLLOUT}.n", 0, "at least 1"),
        (f"{ROLLOUT}.name", "sglang", "'vllm'"),
        (f"{ROLLOUT}.mode", "sync", "'async'"),
        (f"{ROLLOUT}.tensor_model_parallel_size", 3, "a divisor of"),
        (f"{ROLLOUT}.multi_turn.format", "morse", "hermes"),
        (f"{ACTOR}.ppo_mini_batch_size", 17, "at most data.train_batch_size=16"),
        (f"{ACTOR}.strategy", "megatron", "'fsdp' or 'fsdp2'"),
        ("reward.reward_model.enable", True, "False"),
        ("agentlightning.port", 70000, "a port"),
        ("agentlightning.llm_timeout_seconds", 0, "above 0"),
        ("agentlightning.rollout_deadline_seconds", -1.0, "above 0"),
        (f"{ROLLOUT}.temperature", 0.0, "above 0"),
        ("agentlightning.reward_fillna_value", float("nan"), "finite"),
        ("agentlightning.failed_rollouts", "drop", "one of skip, zero"),
        ("agentlightning.sampling", "ask", "one of enforce, allow"),
        ("agentlightning.proxy.host", "0.0.0.0", "agentlightning.proxy.api_key to be set"),
        ("agentlightning.trace_aggregator.level", "turn", "one of transition, trajectory, tree"),
        ("agentlightning.trace_aggregator.truncated_rollouts", "no", "one of train, mask, zero_re"),
        ("agentlightning.trace_aggregator.overlong_prompt", "no", "one of drop, spill"),
        ("agentlightning.max_empty_steps", -1, "at least 0"),
        ("agentlightning.trace_aggregator.trajectory_max_prompt_length", 0, "at least 1"),
        ("agentlightning.trace_aggregator.trajectory_max_response_length", 0, "at least 1"),
        ("agentlightning.trace_aggregator.trajectory_max_total_length", 0, "at least 2"),
        ("agentlightning.trace_aggregator.tree_max_tokens", 0, "at least 1"),
    ],
)
def test_impossible_setting_is_named(key: str, value: object, expected: str) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        compose(documented(**{key.replace(".", "__"): value}), device="cuda")
    message = str(caught.value)
    assert message.startswith(f"{key}={value!r}")
    assert expected in message


def test_what_verl_refuses_is_refused() -> None:
    settings = documented(actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=None)
    with pytest.raises(ValueError, match=r"verl refuses the configuration: .*ppo_micro_batch_"):
        compose(settings, device="cuda")


def test_dotted_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer\.'a\.b': expected a name without dots"):
        compose({"trainer": {"a.b": 1}}, device="cuda")


def test_proxy_may_be_reachable_with_a_key() -> None:
    proxy = {"host": "10.0.0.1", "api_key": "secret"}
    config = compose(documented(agentlightning={"proxy": proxy}), device="cuda").config
    assert config.agentlightning.proxy.host == "10.0.0.1"


def test_use_v1_is_false_with_the_reason() -> None:
    composed = compose(documented(trainer__use_v1=True), device="cuda")
    assert composed.config.trainer.use_v1 is False
    assert [line for line in composed.lines if "use_v1=false: " in line and "queue" in line]


def test_settings_without_effect_are_reported() -> None:
    settings = documented(
        reward={"custom_reward_function": {"path": "reward.py"}}, actor_rollout_ref__rollout__n=1
    )
    said = "\n".join(compose(settings, device="cuda").lines)
    assert "without effect: reward.custom_reward_function.path='reward.py' (rewards" in said
    assert f"{ROLLOUT}.n=1 with algorithm.adv_estimator=grpo" in said


@pytest.mark.parametrize(
    ("multi_turn_format", "parser"),
    [("hermes", "hermes"), ("gpt-oss", "openai"), ("llama3_json", "llama3_json"), (None, None)],
)
def test_multi_turn_format_becomes_vllms_tool_parser(
    multi_turn_format: str | None, parser: str | None
) -> None:
    settings = documented(actor_rollout_ref__rollout__engine_kwargs={"vllm": {"block_size": 16}})
    settings["actor_rollout_ref"]["rollout"]["multi_turn"]["format"] = multi_turn_format
    if multi_turn_format is None:
        settings["actor_rollout_ref"]["rollout"]["engine_kwargs"]["vllm"]["tool_call_parser"] = None
        del settings["actor_rollout_ref"]["rollout"]["multi_turn"]
    vllm = compose(settings, device="cuda").config.actor_rollout_ref.rollout.engine_kwargs.vllm
    assert vllm.tool_call_parser == parser
    assert vllm.get("enable_auto_tool_choice") == (None if parser is None else True)
    assert vllm.block_size == 16


def test_every_format_that_verl_names_has_a_parser() -> None:
    from verl.experimental.agent_loop.tool_parser import ToolParser

    assert {"hermes", "gpt-oss"} <= set(ToolParser._registry)
    for multi_turn_format in ToolParser._registry:
        assert tool_options(multi_turn_format)["enable_auto_tool_choice"] is True


def test_loss_is_scaled_by_the_configured_width() -> None:
    def factor(**changes: Any) -> Any:
        config = compose(documented(**changes), device="cuda").config
        return config.actor_rollout_ref.actor.loss_scale_factor

    trajectory = {"level": "trajectory", "trajectory_max_response_length": 777}
    assert factor() == 256
    assert factor(agentlightning__trace_aggregator=trajectory) == 777
    assert factor(actor_rollout_ref__actor__loss_scale_factor=9) == 9


def test_defaults_have_the_types_that_are_asked_for() -> None:
    plain = OmegaConf.to_container(compose(DOCUMENTED, device="cuda").config, resolve=True)
    assert isinstance(plain, dict)
    check_keys(plain, plain)
