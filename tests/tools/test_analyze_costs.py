"""Estimated costs: by hand, as torch counts them, and what a model's configuration must say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from agl_fast.__main__ import main
from agl_fast.rows.levels import LEVELS
from agl_fast.rows.options import Limits
from agl_fast.tools.analyze import (
    Hardware,
    ModelConfigError,
    ModelShape,
    Traces,
    analyze,
    as_text,
    read_model_shape,
)
from agl_fast.tools.analyze.costs import LOGITS_AT_ONCE, costs_of, flops, state_bytes
from agl_fast.tools.analyze.layouts import lay_out
from support.model_configs import SMALL
from support.plain_rollouts import rollout, to_native
from support.token_traces import DATA

pytest.importorskip("transformers", reason="needs the extra [cpu] or [verl]")

QWEN_EXPERTS = {
    "model_type": "qwen2_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "shared_expert_intermediate_size": 5,
}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
# [1,2]→[3]; [1,2,3,7]→[4]; [1,2,8]→[5]
CALLS = (([1, 2], [3]), ([1, 2, 3, 7], [4]), ([1, 2, 8], [5]))


def shape(tmp_path: Path, **changes: Any) -> ModelShape:
    path = tmp_path / "config.json"
    config = {name: value for name, value in {**SMALL, **changes}.items() if value is not None}
    path.write_text(json.dumps(config))
    return read_model_shape(tmp_path)


def layout(level: Any) -> Any:
    return lay_out([to_native(rollout(*CALLS))], level, Limits()).layout


def test_parameters(tmp_path: Path) -> None:
    """q and o 8 × 8, k and v 8 × 4, three of 8 × 16; embedding and lm_head 32 × 8."""
    of_layer = 2 * 64 + 2 * 32 + 3 * 128
    found = shape(tmp_path)
    assert (found.head_width, found.layer_parameters) == (4, 3 * of_layer)
    assert (found.inner, found.inner_matrices) == (16, 3)
    assert found.parameters == 3 * of_layer + 2 * 256
    assert state_bytes(found) == 16 * found.parameters
    assert shape(tmp_path, tie_word_embeddings=True).parameters == 3 * of_layer + 256
    assert shape(tmp_path, head_dim=6).layer_parameters == 3 * (2 * 96 + 2 * 48 + 3 * 128)


def test_parameters_of_other_families(tmp_path: Path) -> None:
    """As many key heads as heads and no gate; and gate and up, and q, k and v, in one matrix."""
    found = shape(tmp_path, model_type="gpt_neox")
    assert (found.inner, found.inner_matrices) == (16, 2)
    assert found.layer_parameters == 3 * (4 * 64 + 2 * 128)
    fused = shape(tmp_path, model_type="phi3", pad_token_id=0, sliding_window=None)
    plain = shape(tmp_path)
    assert (fused.inner, fused.inner_matrices) == (plain.inner, plain.inner_matrices)
    assert fused.layer_parameters == plain.layer_parameters


def test_experts(tmp_path: Path) -> None:
    """As of Qwen's models, and as of Mixtral, whose experts are as wide as a plain MLP."""
    attention = 2 * 64 + 2 * 32
    found = shape(tmp_path, **QWEN_EXPERTS, mlp_only_layers=[])
    assert (found.inner, found.inner_matrices) == (2 * 6 + 5, 3)
    assert found.layer_parameters == 3 * (attention + 3 * 8 * 17)
    assert found.parameters == 3 * (attention + 3 * 8 * 29) + 2 * 256
    mixtral = shape(tmp_path, **MIXTRAL)
    assert mixtral.inner == 2 * 16
    assert mixtral.parameters == 3 * (attention + 3 * 8 * 64) + 2 * 256
    mixed = shape(tmp_path, **QWEN_EXPERTS, mlp_only_layers=[0])
    assert mixed.inner == 2 * 6 + 5  # of the widest layer; the first has a plain MLP of 16
    assert mixed.layer_parameters == found.layer_parameters - 3 * 8 * (17 - 16)


def test_the_benchmark_of_predictions() -> None:
    pytest.importorskip("verl", reason="needs the extra [cpu] or [verl]")
    from benchmarks.tree_prediction import predicted_flops
    from benchmarks.workload import TINY

    found = predicted_flops("swe_plain", TINY)
    assert found["calls"] > found["merged"] >= found["trees"] > 0


def test_flops_by_hand(tmp_path: Path) -> None:
    """Tokens 12, 9, 7; pairs 31, 25, 22; logits at 12, 9 and 3 positions (`test_analyze`)."""
    model = shape(tmp_path)
    found = {
        (level, each): flops(layout(level), model, recomputed=each)
        for level in LEVELS
        for each in (False, True)
    }
    weights, width, head = 3 * 576, 3 * 2 * 4, 256
    assert found == {
        ("transition", False): 6 * weights * 12 + 12 * width * 31 + 6 * head * 12,
        ("trajectory", False): 6 * weights * 9 + 12 * width * 25 + 6 * head * 9,
        ("tree", False): 6 * weights * 7 + 12 * width * 22 + 8 * head * 3,
        ("transition", True): 8 * weights * 12 + 16 * width * 31 + 6 * head * 12,
        ("trajectory", True): 8 * weights * 9 + 16 * width * 25 + 6 * head * 9,
        ("tree", True): 8 * weights * 7 + 16 * width * 22 + 8 * head * 3,
    }


def test_a_row_costs_what_torch_counts(tmp_path: Path) -> None:
    """But for attention: torch counts all pairs, also those that a mask leaves out."""
    import transformers
    from torch.utils.flop_counter import FlopCounterMode

    n = 11
    config = transformers.Qwen2Config(**SMALL, attn_implementation="eager")
    language_model = transformers.Qwen2ForCausalLM(config)
    with FlopCounterMode(display=False) as counter:
        language_model(torch.arange(n)[None]).logits.sum().backward()
    row = to_native(rollout((list(range(n - 1)), [n - 1])))
    counted = lay_out([row], "transition", Limits()).layout
    model = shape(tmp_path)
    unmasked = 12 * model.layers * model.heads * model.head_width * n * n
    masked = 12 * model.layers * model.heads * model.head_width * n * (n + 1) // 2
    rotary = counter.get_total_flops() - (
        flops(counted, model, recomputed=False) - masked + unmasked
    )
    # The angles of positions are an outer product, without a gradient: 2 · width / 2 · n.
    assert rotary == model.head_width * n


def test_memory_by_hand(tmp_path: Path) -> None:
    model = shape(tmp_path)
    # In bfloat16, a token and layer: two norms of 8 × (4 + 2 + 2), q and o of 8, k and v of 4, and
    # four of 16.
    of_layer = 2 * 8 * 8 + 2 * (2 * 8 + 2 * 4) + 2 * 4 * 16
    # Logits and their gradient, 32 each; or the gradients of three of 16.
    logits, gradients = 2 * 32 * 2, 3 * 16 * 2
    rows = costs_of(layout("transition"), model, Hardware(micro_batch_tokens=8))
    assert rows.micro_batch == 8
    assert rows.activation_bytes == 8 * (3 * of_layer + logits)
    assert rows.activation_bytes_recomputed == 8 * (3 * 8 * 2 + of_layer + gradients)
    trees = costs_of(layout("tree"), model, Hardware(micro_batch_tokens=2))
    assert trees.micro_batch == 7  # no row stands in two
    # Three tokens have logits: in bfloat16 and float32, and the gradients of both.
    assert trees.activation_bytes == 7 * 3 * of_layer + 3 * 32 * 12
    assert 7 * gradients < 3 * 32 * 12


def test_trees_never_hold_all_logits(tmp_path: Path) -> None:
    model = shape(tmp_path, vocab_size=2**30)
    trees = costs_of(layout("tree"), model, Hardware())
    assert trees.activation_bytes_recomputed - 3 * 7 * 8 * 2 == LOGITS_AT_ONCE * 12


def test_the_engine_computes_as_many_logits_at_once() -> None:
    pytest.importorskip("verl", reason="needs the extra [cpu] or [verl]")
    from agl_fast.tree import scores

    assert scores.LOGITS_AT_ONCE == LOGITS_AT_ONCE


def test_time_is_operations_by_speed(tmp_path: Path) -> None:
    model = shape(tmp_path)
    assert costs_of(layout("tree"), model, Hardware()).seconds is None
    found = costs_of(layout("tree"), model, Hardware(tflops=2e-6))
    assert found.seconds == found.flops / 2e6
    assert found.seconds_recomputed == found.flops_recomputed / 2e6
    traces = Traces("here", [to_native(rollout(*CALLS))], dict.fromkeys(LEVELS, Limits()))
    text = as_text(analyze(traces, model=model, hardware=Hardware(tflops=2e-6)))
    assert "seconds at 2e-06 TFLOP/s" in text
    assert "fewer operations than one row a call" in text


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape(tmp_path)
    options = ["--model", str(tmp_path / "config.json"), "--tflops", "1e-3"]
    assert main(["analyze", str(DATA / "swe_think.jsonl.gz"), *options]) == 0
    shown = capsys.readouterr().out
    assert "estimated for 2.24e-06 billion parameters in 3 layers" in shown
    assert "seconds at 0.001 TFLOP/s" in shown
    assert main(["analyze", str(DATA / "swe_think.jsonl.gz"), *options, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["model"]
    assert told["costs"]["tree"]["flops"] < told["costs"]["trajectory"]["flops"]
    assert told["shape"]["parameters"] == 2240


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": None}, "model_type: expected a string"),
        ({"model_type": "none"}, ".*none"),
        ({"vocab_size": "32"}, ".*'vocab_size' expected int, got str .value: '32'"),
        ({"num_hidden_layers": True}, ".*'num_hidden_layers' expected int, got bool"),
        ({"num_key_value_heads": 0}, "num_key_value_heads: expected a whole number"),
        ({"head_dim": 0.5}, "head_dim: expected a whole number"),
        ({"tie_word_embeddings": "no"}, ".*'tie_word_embeddings' expected bool, got str"),
        ({"intermediate_size": -1}, "transformers cannot build model_type='qwen2'"),
        ({"num_key_value_heads": 4}, "num_key_value_heads: expected a divisor of num_attention_h"),
        ({**MIXTRAL, "num_experts_per_tok": 5}, "num_experts_per_tok: expected at most 4"),
        ({**QWEN_EXPERTS, "moe_intermediate_size": "5"}, ".*'moe_intermediate_size' expected int"),
        (
            {"model_type": "mamba2", "num_heads": 4, "head_dim": 4},
            "model_type='mamba2' has .*recurrent layers",
        ),
        ({"is_encoder_decoder": True}, "model_type='qwen2' has an encoder"),
        ({"layer_types": "full_attention"}, ".*layer_types"),
        ({"kv_lora_rank": 512}, "model_type='qwen2' has latent attention"),
        ({"model_type": "mistral"}, "model_type='mistral' has sliding_window=4096 in every layer"),
        ({"layer_types": ["full_attention", *["sliding_attention"] * 2]}, ".* kind 'sliding_att"),
    ],
)
def test_configurations_that_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelConfigError, match=f"config.json: {message}"):
        shape(tmp_path, **changes)


def test_windows_that_are_not_used(tmp_path: Path) -> None:
    assert shape(tmp_path, sliding_window=4096, use_sliding_window=False) == shape(tmp_path)
    assert shape(tmp_path, layer_types=["full_attention"] * 3) == shape(tmp_path)


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[]", "expected an object")])
def test_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelConfigError, match=message):
        read_model_shape(tmp_path)


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_speed_is_a_number_above_0(speed: float) -> None:
    """JSON has no word for the others."""
    with pytest.raises(ValueError, match=f"tflops must be more than 0, and finite, got {speed}"):
        Hardware(tflops=speed)
