"""Which calls were sampled from another distribution than the trainer assumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import agl_fast
from agl_fast.proxy.sampling import SamplingPolicy, bent_by, deviations

COLUMN = "bent_calls_list"


def bent_calls(
    rollouts: Sequence[agl_fast.Rollout], rollout_ids: NDArray[Any], policy: SamplingPolicy | None
) -> NDArray[Any] | None:
    """The column of a batch that the audit reads.

    Args:
        rollouts: with their calls' `sampling`, as the proxy recorded it.
        rollout_ids: of the batch's rows, (B,).
        policy: how the trainer computes log-probs; None: as every call was sampled, but for
            parameters that it never knows.

    Returns:
        (B,) objects: for each row, the names of the parameters that bent a call of its rollout, by
        the call's index. None where no call is bent.
    """
    found = {each.rollout_id: _of_calls(each, policy) for each in rollouts}
    if not any(found.values()):
        return None
    column = np.empty(len(rollout_ids), dtype=object)
    for row, rollout_id in enumerate(rollout_ids):
        column[row] = found.get(rollout_id, {})
    return column


def _of_calls(
    rollout: agl_fast.Rollout, policy: SamplingPolicy | None
) -> Mapping[int, tuple[str, ...]]:
    found = {}
    for index, call in enumerate(rollout.calls):
        if call.sampling is None:  # nobody recorded it
            continue
        names = dict.fromkeys(bent_by(call.sampling))
        if policy is not None:
            names |= dict.fromkeys(deviations(call.sampling, policy))
        if names:
            found[index] = tuple(sorted(names))
    return found
