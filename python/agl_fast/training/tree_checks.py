"""Rows that are prefix trees, and the workers that can train them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from agl_fast.training.worker_groups import WorkerGroups


def holds_trees(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether in some row a token does not follow the one before it.

    Args:
        tensors: attention_mask and position_ids, (B, T).
    """
    real = tensors["attention_mask"].bool()
    follows = tensors["position_ids"].diff(dim=1) == 1
    return bool((real[:, 1:] & real[:, :-1] & ~follows).any())


def require_tree_workers(workers: WorkerGroups) -> None:
    """Ask every worker group whether its engine is the one for trees.

    Raises:
        RuntimeError: one is not, or does not know what a tree is. verl's own engines would take the
            rows and learn something else from them.
    """
    groups = {
        "actor": workers.actor,
        "reference": workers.reference,
        "critic": workers.critic,
    }
    for name, group in groups.items():
        if group is None:
            continue
        ask = getattr(group, "trains_trees", None)
        answers = [False] if ask is None else ask()
        if not all(answers):
            raise RuntimeError(
                f"rows are prefix trees, and the workers of the {name} have another engine than "
                "agl_fast's for trees: expected workers of agl_fast.tree, as VERL starts them "
                "with agentlightning.trace_aggregator.level='tree'"
            )
