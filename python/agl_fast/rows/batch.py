"""The batch that `build_batch` returns."""

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
        tensors: by name (docs/rows.md, "Tensors"). int64: prompts (B, P); responses, response_mask
            and, with the option call_index, call_index (B, R); input_ids, attention_mask and
            position_ids (B, T). float32: token_level_scores and, if any row has log-probs,
            rollout_log_probs (B, R). bool: is_drop_mask (B,). position_ids are (B, D, T) if calls
            have position_ids in D dimensions; at level tree they are depths in the rollout's tree
            (docs/tree.md). In layout jagged all but is_drop_mask are
            nested tensors, and attention_mask is absent.
        columns: by name, one entry per row: data_id_list, rollout_id_list, first_call_index_list,
            turn_index_list (level transition), has_rollout_log_probs.
        rollouts: the rollout table, one entry per rollout in the order given, also without rows.
        accounting: every sampled token by class.
        mismatches: broken prefixes (level trajectory).
        metrics: ``training/*``.
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
