"""Staleness of trained tokens: policy versions between the sampling policy and the actor."""

from __future__ import annotations

import numpy as np
import torch

from agl_fast.rollouts.training_rows import CALL_VERSIONS
from agl_fast.training.step_rows import Rows


def token_versions(rows: Rows) -> torch.Tensor | None:
    """The policy version that sampled each trained token.

    Args:
        rows: with `policy_version_min_list`, and, if versions differ, with
            `call_policy_versions_list` and call_index.

    Returns:
        (B, R) int64, arbitrary on tokens that are not trained; None if a version is unknown.
    """
    if "policy_version_min_list" not in rows.columns:
        return None
    oldest = torch.from_numpy(np.asarray(rows.columns["policy_version_min_list"], dtype=np.int64))
    if (oldest < 0).any():
        return None
    versions = oldest[:, None].expand(rows.response_mask.shape).clone()
    if CALL_VERSIONS in rows.columns:
        calls = rows.call_index
        assert calls is not None, "rows of several policy versions have a call_index"
        for row, of_calls in enumerate(rows.columns[CALL_VERSIONS]):
            trained = rows.response_mask[row].bool()
            versions[row, trained] = torch.from_numpy(of_calls)[calls[row, trained]]
    return versions


def staleness_metrics(rows: Rows, policy_version: int) -> dict[str, float]:
    """Mean and maximum over trained tokens, and the share of tokens of each staleness.

    Args:
        policy_version: of the actor before this update.

    Returns:
        `training/staleness/mean`, `training/staleness/max` and, per staleness k,
        `training/staleness/tokens/{k}`; empty if a version is unknown.
    """
    versions = token_versions(rows)
    trained = rows.response_mask.bool()
    if versions is None or not trained.any():
        return {}
    staleness = policy_version - versions[trained].numpy()
    values, counts = np.unique(staleness, return_counts=True)
    shares = {
        f"training/staleness/tokens/{value}": float(count / len(staleness))
        for value, count in zip(values.tolist(), counts.tolist(), strict=True)
    }
    return {
        "training/staleness/mean": float(staleness.mean()),
        "training/staleness/max": float(staleness.max()),
        **shares,
    }
