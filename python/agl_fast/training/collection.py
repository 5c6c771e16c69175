"""The trainer's side of asynchronous collection (`agentlightning.collection`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from agl_fast.rollouts import AgentModeDaemon
from agl_fast.rollouts.group_schedule import GroupSchedule
from agl_fast.training.sample_stream import SampleStream
from agl_fast.verl.config.collection import is_asynchronous


class SamplesExhaustedError(Exception):
    """All samples of all epochs have been trained or counted."""


def collects(config: DictConfig) -> bool:
    """Whether groups are collected one by one, instead of batch after batch.

    So are those of synchronous collection with `algorithm.filter_groups`, which replaces groups
    while a step waits.
    """
    filters = OmegaConf.select(config, "algorithm.filter_groups.enable", default=False)
    return is_asynchronous(config) or bool(filters)


def schedule_of(config: DictConfig) -> GroupSchedule:
    """The limits of a configuration; in synchronous collection nothing is stale."""
    settings = config.agentlightning.collection
    is_sync = settings.mode == "sync"
    return GroupSchedule(
        n_groups=config.data.train_batch_size,
        max_staleness=0 if is_sync else settings.max_staleness,
        oversample=1.0 if is_sync else settings.oversample,
    )


class Collection:
    """Collect the groups of each step, and let their rollouts go on across weight syncs.

    Args:
        daemon: runs the agents.
        config: of the run.
        stream: the samples.
        sleep: puts the servers to sleep, which also empties their prefix caches.
    """

    def __init__(
        self,
        daemon: AgentModeDaemon,
        config: DictConfig,
        stream: SampleStream,
        sleep: Callable[[], None],
    ) -> None:
        self._daemon = daemon
        self._config = config
        self._stream = stream
        self._sleep = sleep
        self._drain_seconds = config.agentlightning.collection.drain_seconds
        self._overlaps = config.agentlightning.collection.mode == "overlap"

    def begin(self, server_addresses: list[str], n_steps: int) -> None:
        """Start the first groups.

        Args:
            n_steps: steps that are left to train.
        """
        filters = self._config.algorithm.get("filter_groups") or {}
        batches = filters.get("max_num_gen_batches") or 0
        limit = batches * self._config.data.train_batch_size if batches > 0 else None
        self._daemon.begin_collection(
            self._stream,
            server_addresses,
            schedule_of(self._config),
            n_steps=n_steps,
            filters_groups=bool(filters.get("enable")),
            max_generated_groups=limit,
            on_stale=self._config.agentlightning.collection.on_stale,
        )

    def collect(self) -> int:
        """Wait for the step's groups; the daemon's training batch has their rollouts.

        Where servers and trainer share devices, calls are held from here to the weight sync.

        Returns:
            The number of rollouts.

        Raises:
            SamplesExhaustedError: there are no samples left.
        """
        groups = self._daemon.collect_groups()
        if not groups.rollout_ids and groups.is_last:
            raise SamplesExhaustedError
        if not self._overlaps:
            self._hold()
        return len(groups.rollout_ids)

    @contextmanager
    def syncing(self, version: int) -> Iterator[None]:
        """Let no call reach the servers while the block changes their weights.

        Args:
            version: of the new weights.
        """
        if self._overlaps:  # otherwise held since `collect`
            self._hold()
        yield
        self._daemon.release(version)

    def save(self, checkpoint: Path) -> None:
        """Save which samples are in flight."""
        self._daemon.look_at_samples(partial(self._stream.save, checkpoint))

    def end(self) -> None:
        """Cancel what is in flight."""
        self._daemon.end_collection()

    def _hold(self) -> None:
        self._daemon.hold(self._drain_seconds)
        self._sleep()
