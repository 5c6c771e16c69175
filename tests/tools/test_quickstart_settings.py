"""The quickstart's settings are ones that VERL takes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu]")

from agl_fast.quickstart.settings import verl_settings
from agl_fast.verl.config import compose


@pytest.mark.parametrize(("model", "device"), [(None, "cpu"), ("some/model", "cuda")])
def test_settings_are_accepted(model, device):
    settings = verl_settings(Path("run"), model=model, steps=3, seed=5, n_devices=1)
    config = compose(settings, device=device).config
    assert config.actor_rollout_ref.model.path == (model or "run/model")
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm.tool_call_parser == "hermes"
    assert config.agentlightning.trace_aggregator.level == "trajectory"
    assert config.trainer.n_gpus_per_node == 1
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == 1
    assert config.trainer.total_training_steps == 3
    assert config.trainer.test_freq == 1


@pytest.mark.parametrize("level", ["transition", "trajectory", "tree"])
def test_the_model_that_reasons_is_trained_at_any_level(level):
    settings = verl_settings(Path("run"), model=None, steps=3, seed=5, level=level, reasoning=True)
    config = compose(settings, device="cpu").config
    assert config.agentlightning.trace_aggregator.level == level
    assert config.data.max_prompt_length == 192
    assert config.data.max_response_length == 48
    assert config.agentlightning.trace_aggregator.trajectory_max_prompt_length == 192
