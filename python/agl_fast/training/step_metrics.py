"""Metrics of verl and Agent-lightning about the rows of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from verl import DataProto
from verl.trainer.ppo.metric_utils import compute_data_metrics

from agl_fast.rows.options import RowOptions
from agl_fast.training.step_rows import Rows
from agl_fast.training.trained_tokens import on_trained


def configured_widths(config: Any) -> tuple[int, int]:
    """P and R of the configured level, also where batches are trimmed; at level tree a call's."""
    options = RowOptions.from_config(config)
    return options.max_prompt_length, options.max_response_length


def row_limits(config: Any) -> tuple[int, int]:
    """Most tokens of a row's prompt, and of its response."""
    return RowOptions.from_config(config).row_limits


def total_limit(config: Any) -> int | None:
    """Most tokens of a row's prompt and response together; None: no limit of its own."""
    return RowOptions.from_config(config).max_total_length


def data_metrics(
    tensors: Mapping[str, torch.Tensor],
    widths: tuple[int, int],
    *,
    use_critic: bool,
    suffix: str,
    total: int | None = None,
) -> dict[str, float]:
    """verl's metrics of scores, rewards, advantages, returns and lengths, each with `suffix`.

    `response_length/*` counts a row's sampled tokens, `context_length/*` its other response tokens:
    tool results, user messages, tokens trained in other rows.

    Args:
        tensors: (B, …), with token_level_scores, token_level_rewards, advantages and returns; with
            values if there is a critic; with `sampled`, 1 on sampled tokens, if `response_mask`
            excludes some of them.
        widths: P and R as configured; rows of these lengths count as clipped.
        suffix: `_before_processing` for all rows, `_after_processing` for trained rows.
        total: limit on prompt plus response, if there is one.
    """
    n_prompt, n_response, n_sampled = row_lengths(tensors)
    sampled = tensors.get("sampled", tensors["response_mask"])
    rewards = {
        name: on_trained(tensors[name], sampled)
        for name in ("token_level_scores", "token_level_rewards")
    }
    # verl takes lengths of this name before it counts itself.
    lengths = {"prompt_length": n_prompt.float(), "response_length": n_sampled.float()}
    rows = DataProto.from_dict(tensors={**tensors, **rewards, **lengths})
    metrics = compute_data_metrics(rows, use_critic=use_critic)
    metrics["prompt_length/clip_ratio"] = (n_prompt >= widths[0]).double().mean()
    is_clipped = n_response >= widths[1]
    if total is not None:
        is_clipped |= n_prompt + n_response >= total
    clipped = is_clipped.double().mean()  # no row is without a response
    metrics["response_length/clip_ratio"] = clipped
    metrics["response_length_non_aborted/clip_ratio"] = clipped
    context = (n_response - n_sampled).double()
    metrics |= {f"context_length/{name}": value for name, value in _spread(context).items()}
    return {f"{name}{suffix}": float(value) for name, value in metrics.items()}


def rollout_metrics(rows: Rows) -> dict[str, float]:
    """verl's `critic/*`, `prompt_length/*` and `response_length/*`, with rollouts as sequences.

    So the level has no influence. Scores, rewards and `response_length/*` (sampled tokens) are over
    all rollouts of the step; `prompt_length/*` is the first prompt of a rollout's first row. A
    rollout that lost sampled tokens to a limit counts as clipped, one without a row as aborted.
    Advantages, returns and values are over trained tokens, as in verl.

    Args:
        rows: with token_level_rewards, advantages and returns; `sampled` as for `data_metrics`;
            values with a critic.
    """
    tensors, rollouts = rows.tensors, rows.rollouts
    n_prompt, _, n_sampled = row_lengths(tensors)
    sampled = tensors.get("sampled", tensors["response_mask"])
    change = on_trained(tensors["token_level_rewards"] - tensors["token_level_scores"], sampled)
    of_id = {rollout.rollout_id: number for number, rollout in enumerate(rollouts)}
    owner = torch.tensor([of_id[each] for each in rows.rollout_of_row])
    scores = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
    rewards = scores.index_add(0, owner, change.double().sum(dim=1))
    lengths = torch.zeros(len(rollouts), dtype=torch.float64).index_add(
        0, owner, n_sampled.double()
    )
    has_row = torch.bincount(owner, minlength=len(rollouts)) > 0
    first = torch.full((len(rollouts),), len(owner)).scatter_reduce(
        0, owner, torch.arange(len(owner)), "amin"
    )
    trained = tensors["response_mask"].bool()
    of_tokens = {
        name: tensors[name][trained].double()
        for name in ("advantages", "returns", "values")
        if name in tensors
    }
    of_what = {
        "critic/score": scores,
        "critic/rewards": rewards,
        "response_length": lengths,
        "response_length_non_aborted": lengths[has_row],
        "prompt_length": n_prompt.double()[first[has_row]],
        **{f"critic/{name}": values for name, values in of_tokens.items()},
    }
    metrics = {
        f"{what}/{name}": value
        for what, values in of_what.items()
        if len(values)
        for name, value in _spread(values).items()
    }
    metrics["response_length/clip_ratio"] = sum(each.truncated for each in rollouts) / len(rollouts)
    metrics["response/aborted_ratio"] = float((~has_row).double().mean())
    if "values" in of_tokens:
        unexplained = (of_tokens["returns"] - of_tokens["values"]).var(correction=0)
        variance = of_tokens["returns"].var(correction=0)
        metrics["critic/vf_explained_var"] = float(1.0 - unexplained / (variance + 1e-5))
    return metrics


def row_lengths(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(B,) each: prompt tokens, response tokens, sampled response tokens."""
    width = tensors["prompts"].shape[1]
    attended = tensors["attention_mask"]
    sampled = tensors.get("sampled", tensors["response_mask"])
    return attended[:, :width].sum(dim=1), attended[:, width:].sum(dim=1), sampled.sum(dim=1)


def _spread(values: torch.Tensor) -> dict[str, float]:
    return {
        "mean": float(values.mean()),
        "max": float(values.max()),
        "min": float(values.min()),
    }


def in_all_rows(
    kept: torch.Tensor, values: Mapping[str, torch.Tensor], keys: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """Values of the kept rows scattered to all rows, 0 elsewhere.

    Args:
        kept: (B,) bool.
        values: by name, (kept rows, R) each.
        keys: names to scatter; absent ones are skipped.
    """
    placed = {}
    for key in keys:
        if key in values:
            placed[key] = values[key].new_zeros(len(kept), values[key].shape[1])
            placed[key][kept] = values[key]
    return placed
