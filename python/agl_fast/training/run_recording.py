"""What a run writes down and says of its rollouts."""

from __future__ import annotations

from typing import Any

from agl_fast.recording import RunRecorder
from agl_fast.rows.options import RowOptions, config_keys
from agl_fast.rows.token_summary import TokenSummary
from agl_fast.verl.config import differences


def run_recorder(config: Any, pad_token_id: int) -> RunRecorder | None:
    """The run's recorder, as `agentlightning.record_dir` says."""
    if config.agentlightning.record_dir is None:
        return None
    rows = RowOptions.from_config(config, pad_token_id=pad_token_id)
    return RunRecorder(
        config.agentlightning.record_dir,
        {"rows": rows.to_header(), "settings": differences(config)},
    )


def padding_token_id(tokenizer: Any) -> int:
    """The tokenizer's, or where it has none, the id that ends a text."""
    own = tokenizer.pad_token_id
    return int(tokenizer.eos_token_id if own is None else own)


def token_summary(config: Any, *, tree_is_refused: bool = False) -> TokenSummary:
    """Of a run that begins; it names limits as the configuration does."""
    level = config.agentlightning.trace_aggregator.level
    return TokenSummary(level, config_keys(level), tree_is_refused=tree_is_refused)
