"""What a batch is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from agl_fast.rows.accounting import Accounting, Mismatch, RolloutEntry


@dataclass(slots=True)
class Batch:
    """One PPO batch: B rows, P prompt width, R response width, T = P + R.

    Attributes:
        tensors: by name (docs/rows.md, "Tensors"): prompts (B, P), responses, response_mask
            and, if asked for, call_index (B, R), input_ids, attention_mask and position_ids (B, T),
            all int64; token_level_scores (B, R) float32; is_drop_mask (B,) bool;
            rollout_log_probs (B, R) float32 if any row has some. At level tree position_ids are
            depths in the rollout's tree (docs/tree.md). In layout jagged the first eight
            and rollout_log_probs are nested tensors, and attention_mask is left out.
        columns: by name, one entry a row: data_id_list, rollout_id_list, first_call_index_list,
            turn_index_list (level transition), has_rollout_log_probs.
        rollouts: one entry per rollout, in the order given, also those without rows.
        accounting: what became of every sampled token.
        mismatches: calls that extended no chain although one was open (level trajectory).
        metrics: ``training/*`` numbers.
    """

    tensors: dict[str, torch.Tensor]
    columns: dict[str, NDArray[Any]]
    rollouts: list[RolloutEntry]
    accounting: Accounting
    mismatches: list[Mismatch]
    metrics: dict[str, float]

    def __len__(self) -> int:
        """B, the number of rows."""
        return len(self.columns["rollout_id_list"])
