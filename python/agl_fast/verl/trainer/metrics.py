"""The numbers that verl and Agent-lightning log about a step's rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.trainer.ppo.metric_utils import compute_data_metrics


def configured_widths(config: Any) -> tuple[int, int]:
    """P and R of the configured level, which a trimmed batch does not show.

    At level tree, where rows have no such widths, those of a call.
    """
    aggregator = OmegaConf.select(config, "agentlightning.trace_aggregator")
    if aggregator is not None and aggregator.level.startswith("trajectory"):
        return (
            aggregator.trajectory_max_prompt_length,
            aggregator.trajectory_max_response_length,
        )
    return config.data.max_prompt_length, config.data.max_response_length


def row_limits(config: Any) -> tuple[int, int]:
    """As many tokens as the prompt and the response of a row may have."""
    aggregator = OmegaConf.select(config, "agentlightning.trace_aggregator")
    if aggregator is not None and aggregator.level == "tree":
        return aggregator.tree_max_tokens, aggregator.tree_max_tokens
    return configured_widths(config)


def data_metrics(
    tensors: Mapping[str, torch.Tensor], widths: tuple[int, int], *, use_critic: bool, suffix: str
) -> dict[str, float]:
    """verl's numbers about scores, rewards, advantages, returns and lengths, each with `suffix`.

    Args:
        tensors: (B, …) of the rows, with token_level_scores, token_level_rewards, advantages and
            returns, and with values where there is a critic.
        widths: P and R as configured: rows as long as these were clipped.
        suffix: `_before_processing` for all rows, `_after_processing` for those that are trained.
    """
    rows = DataProto.from_dict(tensors=dict(tensors))
    found = compute_data_metrics(rows, use_critic=use_critic)
    prompt_width = tensors["prompts"].shape[1]
    n_prompt = tensors["attention_mask"][:, :prompt_width].sum(dim=1)
    n_response = tensors["attention_mask"][:, prompt_width:].sum(dim=1)
    found["prompt_length/clip_ratio"] = (n_prompt >= widths[0]).double().mean()
    clipped = (n_response >= widths[1]).double().mean()  # no row is without a response
    found["response_length/clip_ratio"] = clipped
    found["response_length_non_aborted/clip_ratio"] = clipped
    return {f"{name}{suffix}": float(value) for name, value in found.items()}


def in_all_rows(
    kept: torch.Tensor, values: Mapping[str, torch.Tensor], keys: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """Values of the kept rows among all rows, 0 on the others.

    Args:
        kept: (B,) bool.
        values: by name, (kept rows, R) each.
        keys: those to take, if they are there.
    """
    placed = {}
    for key in keys:
        if key in values:
            placed[key] = values[key].new_zeros(len(kept), values[key].shape[1])
            placed[key][kept] = values[key]
    return placed
