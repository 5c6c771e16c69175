"""The rollouts of one batch of samples, from the trainer's columns until all have finished."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from agentlightning.types import EnqueueRolloutRequest, RolloutConfig
from pydantic_core import PydanticSerializationError, to_json

from agl_fast.printable import shown
from agl_fast.rollouts.finished import FinishedRollout
from agl_fast.rollouts.progress import PendingRollouts, Source
from agl_fast.rollouts.training_rows import TrainingRows
from agl_fast.verl.membership import ROLLOUT_KEY, current_run

logger = logging.getLogger(__name__)

_PROGRESS_SECONDS = 10.0


def samples_of(data: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """One dictionary per row, with plain Python values.

    Args:
        data: columns of one length, such as ``DataProto.non_tensor_batch``.

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


def require_json(samples: Sequence[Mapping[str, Any]]) -> None:
    """Check that samples can be sent to runners in other processes.

    A store that is served has given a rollout to its runner before it fails to send the sample: the
    runner hears nothing of it.

    Raises:
        TypeError: JSON cannot hold a value; the message names sample, column and value.
    """
    for index, sample in enumerate(samples):
        for name, value in sample.items():
            try:
                to_json(value)
            except (PydanticSerializationError, ValueError) as error:
                raise TypeError(
                    f"sample {index} of the batch: {name}={shown(value)} of type "
                    f"{type(value).__name__}: expected what JSON can hold, such as a path or "
                    f"base64 text, as runners get samples over HTTP: {error}"
                ) from None


def rollout_requests(
    samples: Sequence[Mapping[str, Any]],
    n: int,
    mode: Literal["train", "val"],
    resources_id: str,
    config: RolloutConfig,
) -> list[EnqueueRolloutRequest]:
    """``n`` rollouts of each sample, with a new data_id per sample."""
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
    """The value with numpy arrays as lists and numpy scalars as Python's, recursively."""
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, Mapping):
        return {plain(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(entry) for entry in value]
    return value


class RunningBatch:
    """The rollouts of a batch; collects each one as soon as it finishes.

    Args:
        samples: the enqueued sample of each rollout id, with its ``data_id``.
        policy_version: of the servers when the rollouts were enqueued.
        rows: of a training batch; None: a validation.

    Attributes:
        enqueued_at: seconds since the epoch.
    """

    def __init__(
        self,
        source: Source,
        pending: PendingRollouts,
        samples: Mapping[str, dict[str, Any]],
        *,
        policy_version: int,
        rows: TrainingRows | None,
    ) -> None:
        self.policy_version = policy_version
        self.rows = rows
        self._source = source
        self._pending = pending
        self._samples = samples
        self._finished: dict[str, FinishedRollout] = {}
        self._n_handed_out = 0
        self.enqueued_at = time.time()

    @property
    def is_train(self) -> bool:
        return self.rows is not None

    @property
    def rollout_ids(self) -> list[str]:
        return list(self._samples)

    @property
    def running(self) -> list[str]:
        """Ids of rollouts that have not finished."""
        return [rollout_id for rollout_id in self._samples if rollout_id not in self._finished]

    @property
    def finished(self) -> list[FinishedRollout]:
        """The finished rollouts, in the order of enqueueing."""
        return [self._finished[each] for each in self._samples if each in self._finished]

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of rollouts that the store reported and that are not of this batch, by kind."""
        return {f"{name}_rollouts": count for name, count in self._pending.counts.items()}

    async def collect(self, take: Callable[[FinishedRollout], None], *, verbose: bool) -> None:
        """Wait until every rollout has finished.

        Args:
            take: called with each rollout in the order of enqueueing, as soon as all rollouts
                before it have finished. So the order of finishing has no influence.
        """
        reported_at = time.monotonic()
        while self._pending.rollout_ids:
            for end in await self._pending.next_ends():
                sample = self._samples[end.rollout_id]
                rollout = await self._source.finished_rollout(end, sample)
                if rollout is None:
                    self._pending.wait_again(end)
                    continue
                self._finished[end.rollout_id] = rollout
            self._hand_out(take)
            if verbose and time.monotonic() - reported_at > _PROGRESS_SECONDS:
                reported_at = time.monotonic()
                n_finished, n_samples = len(self._finished), len(self._samples)
                logger.info("%d/%d rollouts finished", n_finished, n_samples)

    async def cancel(self) -> None:
        """Give up the rollouts that have not finished."""
        for rollout_id in self._pending.rollout_ids:
            await self._source.give_up(rollout_id)

    def _hand_out(self, take: Callable[[FinishedRollout], None]) -> None:
        for rollout_id in list(self._samples)[self._n_handed_out :]:
            if rollout_id not in self._finished:
                break
            take(self._finished[rollout_id])
            self._n_handed_out += 1


@dataclass(frozen=True, eq=False)
class CollectedStep:
    """The rollouts of the groups that a step trains, as a batch that has finished.

    Attributes:
        finished: in the order in which their groups started.
        counts: of rollouts that the store reported and that are unknown, by kind.
        collection: `training/collection/*`, without the prefix.
        is_last: there are no more samples.
        enqueued_at: when its first group started, in seconds since the epoch.
    """

    finished: list[FinishedRollout]
    counts: dict[str, int]
    collection: dict[str, float]
    policy_version: int
    rows: TrainingRows
    is_last: bool
    enqueued_at: float
    is_train: bool = True

    @property
    def rollout_ids(self) -> list[str]:
        return [each.rollout_id for each in self.finished]
