"""A trainer's columns as rollouts that go into the store."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from agentlightning.types import EnqueueRolloutRequest, RolloutConfig

from agl_fast.verl.membership import ROLLOUT_KEY, current_run


def samples_of(data: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """One dictionary a row, with plain Python values.

    Args:
        data: columns of one length, as ``DataProto.non_tensor_batch`` holds them.

    Raises:
        ValueError: there is no sample, or the columns differ in length.
    """
    lengths = {name: len(column) for name, column in data.items()}
    if not lengths or not max(lengths.values()):
        raise ValueError("data has no samples")
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the columns of data differ in length: {lengths}")
    n_samples = next(iter(lengths.values()))
    return [{name: plain(column[i]) for name, column in data.items()} for i in range(n_samples)]


def rollout_requests(
    samples: Sequence[Mapping[str, Any]],
    n: int,
    mode: Literal["train", "val"],
    resources_id: str,
    config: RolloutConfig,
) -> list[EnqueueRolloutRequest]:
    """``n`` rollouts of each sample, under a data_id that is new each time it is enqueued."""
    run = current_run()
    of_run = {} if run is None else {ROLLOUT_KEY: run.run_id}
    requests = []
    for sample in samples:
        data_id = str(uuid.uuid4())
        requests += [
            EnqueueRolloutRequest(
                input={**sample, "data_id": data_id},
                mode=mode,
                resources_id=resources_id,
                config=config,
                metadata={"data_id": data_id, "is_train": mode == "train", **of_run},
            )
            for _ in range(n)
        ]
    return requests


def plain(value: Any) -> Any:
    """The value with numpy's arrays as lists and its scalars as Python's, also inside others."""
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, Mapping):
        return {plain(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(entry) for entry in value]
    return value
