"""What a run writes down and says of its rollouts."""

from __future__ import annotations

from typing import Any

from agl_fast.recording import RunRecorder
from agl_fast.rows.token_summary import TokenSummary
from agl_fast.training.step_metrics import configured_widths
from agl_fast.verl.config import differences


def run_recorder(config: Any, pad_token_id: int) -> RunRecorder | None:
    """The run's recorder, as `agentlightning.record_dir` says."""
    if config.agentlightning.record_dir is None:
        return None
    return RunRecorder(
        config.agentlightning.record_dir,
        {"rows": row_options(config, pad_token_id), "settings": differences(config)},
    )


def row_options(config: Any, pad_token_id: int) -> dict[str, Any]:
    """The options of `build_batch` that the configuration comes to."""
    aggregator = config.agentlightning.trace_aggregator
    is_trajectory = aggregator.level == "trajectory"
    max_prompt_length, max_response_length = configured_widths(config)
    return {
        "level": aggregator.level,
        "max_prompt_length": max_prompt_length,
        "max_response_length": max_response_length,
        "max_total_length": aggregator.trajectory_max_total_length if is_trajectory else None,
        "overlong_prompt": aggregator.overlong_prompt,
        "truncated_rollouts": aggregator.truncated_rollouts,
        "tree_max_tokens": aggregator.tree_max_tokens,
        "trim": aggregator.trim,
        "pad_token_id": pad_token_id,
        "reward_fillna_value": config.agentlightning.reward_fillna_value,
    }


def padding_token_id(tokenizer: Any) -> int:
    """The tokenizer's, or where it has none, the id that ends a text."""
    own = tokenizer.pad_token_id
    return int(tokenizer.eos_token_id if own is None else own)


def token_summary(config: Any, *, tree_is_refused: bool = False) -> TokenSummary:
    """Of a run that begins; it names limits as the configuration does."""
    level = config.agentlightning.trace_aggregator.level
    ours = "agentlightning.trace_aggregator."
    prefix = "data." if level == "transition" else f"{ours}trajectory_"
    names = ("max_prompt_length", "max_response_length", "max_total_length")
    keys = {name: f"{prefix}{name}" for name in names}
    return TokenSummary(
        level,
        {**keys, "tree_max_tokens": f"{ours}tree_max_tokens"},
        tree_is_refused=tree_is_refused,
    )
