"""Asynchronous collection: groups of rollouts in flight across training steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, Protocol

from agl_fast.rollouts.finished import FinishedRollout
from agl_fast.rollouts.group_schedule import GroupSchedule
from agl_fast.rollouts.progress import PendingRollouts, Source

Sample = dict[str, Any]


@dataclass(eq=False)
class Group:
    """The rollouts of one sample.

    Attributes:
        number: place in the order of starting.
        sample: as drawn.
        inputs: of each rollout id: the sample with its `data_id`.
        finished: by rollout id.
        version: policy version of its oldest call; None before the first call.
        started_at: when it was enqueued, in seconds since the epoch.
        complete_at: when its last rollout ended, by `time.monotonic`; None before.
    """

    number: int
    sample: Sample
    inputs: dict[str, Sample]
    finished: dict[str, FinishedRollout] = field(default_factory=dict)
    version: int | None = None
    started_at: float = field(default_factory=time.time)
    complete_at: float | None = None

    @property
    def rollouts(self) -> list[FinishedRollout]:
        """Its finished rollouts, in the order of enqueueing."""
        return [self.finished[each] for each in self.inputs if each in self.finished]

    @property
    def running(self) -> list[str]:
        """Ids of its rollouts that have not finished."""
        return [each for each in self.inputs if each not in self.finished]


class Draws(Protocol):
    """A stream of samples: `agl_fast.training.sample_stream.SampleStream`."""

    # None: there are no more.
    def draw(self) -> Sample | None: ...


@dataclass(frozen=True)
class CollectedGroups:
    """What a step trains, and what became of other groups since the last step.

    Attributes:
        groups: in the order of starting.
        set_aside: groups that are not trained, by reason: `no_reward_variance`, `stale`.
        counts: `training/collection/*`.
        is_last: there are no more samples, and no group is in flight.
    """

    groups: list[Group]
    set_aside: dict[str, list[Group]]
    counts: dict[str, float]
    is_last: bool


class Collector:
    """Start groups of rollouts as far as the schedule allows, and hand over complete ones.

    All methods run on the daemon's event loop.

    Args:
        source: of the daemon.
        pending: without rollouts.
        start: enqueues the rollouts of samples and announces them; returns the store's rollouts
            and the input of each, in the order of the samples.
        schedule: limits of groups in flight.
        draws: the samples.
        oldest_version: of a rollout's calls so far; None: it has made none.
        is_kept: whether a complete group is trained; others are replaced (`filter_groups`).
        max_generated: complete groups per step after which it is trained with fewer; None: no
            limit.
        on_stale: `train`: a step waits for groups that cannot be postponed; `drop`: it cancels
            them.
    """

    def __init__(
        self,
        source: Source,
        pending: PendingRollouts,
        *,
        start: Callable[[list[Sample]], Awaitable[tuple[Sequence[Any], dict[str, Sample]]]],
        schedule: GroupSchedule,
        draws: Draws,
        oldest_version: Callable[[str], int | None],
        is_kept: Callable[[Group], bool],
        max_generated: int | None = None,
        on_stale: Literal["train", "drop"] = "train",
    ) -> None:
        self._source = source
        self._pending = pending
        self._start = start
        self._schedule = schedule
        self._draws = draws
        self._oldest_version = oldest_version
        self._is_kept = is_kept
        self._max_generated = max_generated
        self._on_stale = on_stale
        self._version = 0
        self._next_update = 0
        self._n_wanted = 0  # groups that the remaining steps train
        self._n_started = 0
        self._n_generated = 0  # complete groups since the last step
        self._has_samples = True
        self._group_of: dict[str, Group] = {}
        self._in_flight: list[Group] = []
        self._starting: list[Sample] = []  # drawn, and not in flight before they are enqueued
        self._set_aside: dict[str, list[Group]] = {}
        self._changed = asyncio.Condition()
        self._may_start = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def in_flight(self) -> list[Group]:
        """Groups that no step has taken, in the order of starting."""
        return list(self._in_flight)

    async def look(self, look: Callable[[list[Sample]], None]) -> None:
        """Call `look` while nothing is drawn.

        Args:
            look: gets the samples that were drawn and that no step has taken, in the order of
                drawing.
        """
        look([*(group.sample for group in self._in_flight), *self._starting])

    @property
    def unknown_rollouts(self) -> dict[str, int]:
        """Numbers of rollouts that the store reported and that are not in flight, by kind."""
        counts = {f"{name}_rollouts": count for name, count in self._pending.counts.items()}
        self._pending.counts.clear()
        return counts

    async def begin(self, version: int, n_steps: int) -> None:
        """Start collecting.

        Args:
            version: policy version that the servers hold.
            n_steps: steps that are left to train.
        """
        self._version = self._next_update = version
        self._n_wanted = n_steps * self._schedule.n_groups
        self._may_start.set()
        self._task = asyncio.ensure_future(self._run())

    async def end(self) -> None:
        """Cancel all groups."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for group in self._in_flight:
            await self._cancel(group)
        self._in_flight.clear()

    async def updated(self, version: int) -> None:
        """The servers hold the policy version of the update since the last `take`."""
        self._version = self._next_update = version
        self._may_start.set()

    async def take(self) -> CollectedGroups:
        """Wait for the groups that the next step trains.

        What starts from here until `updated` is one version old when the next step trains it.

        Returns:
            `n_groups` groups; fewer if there are no more samples, or if `max_generated` groups
            have been generated for the step.

        Raises:
            The error that ended collecting.
        """
        assert self._task is not None, "collecting has not begun"
        async with self._changed:
            while True:
                if (groups := self._step()) is not None:
                    break
                if self._task.done():
                    self._task.result()
                    raise RuntimeError("collecting has ended")
                await self._changed.wait()
        self._in_flight = [each for each in self._in_flight if each not in groups]
        self._n_wanted -= self._schedule.n_groups
        self._next_update = self._version + 1
        dropped = await self._drop_stale() if self._on_stale == "drop" else 0
        set_aside, self._set_aside = self._set_aside, {}
        now = time.monotonic()
        waited = [now - each.complete_at for each in groups if each.complete_at is not None]
        counts = {
            "groups": len(groups),
            "generated_groups": self._n_generated,
            "groups_in_flight": len(self._in_flight),
            "complete_groups": sum(each.complete_at is not None for each in self._in_flight),
            "stale_groups": dropped,
            "filtered_groups": len(set_aside.get("no_reward_variance", [])),
            "waited_seconds/mean": sum(waited) / len(waited) if waited else 0.0,
            "waited_seconds/max": max(waited, default=0.0),
        }
        self._n_generated = 0
        for group in [*groups, *(each for aside in set_aside.values() for each in aside)]:
            for rollout_id in group.inputs:
                self._group_of.pop(rollout_id, None)
        self._may_start.set()
        is_last = not self._has_samples and not self._in_flight
        return CollectedGroups(groups, set_aside, counts, is_last)

    def _step(self) -> list[Group] | None:
        complete = [each for each in self._in_flight if each.complete_at is not None]
        running = [each for each in self._in_flight if each.complete_at is None]
        self._look_at_versions(running)
        if self._max_generated is not None and self._n_generated >= self._max_generated:
            return sorted(complete, key=lambda each: each.number)[: self._schedule.n_groups]
        if self._has_samples and self._n_startable() > 0:
            return None  # groups are about to start
        waits = self._on_stale == "train"
        return self._schedule.step(complete, running, self._version, waits=waits)

    def _look_at_versions(self, groups: Sequence[Group]) -> None:
        for group in groups:
            if group.version is None:
                versions = [self._oldest_version(each) for each in group.running]
                versions += [_oldest(each) for each in group.rollouts]
                group.version = min((each for each in versions if each is not None), default=None)

    def _n_startable(self) -> int:
        n = self._schedule.n_startable(self._in_flight, self._version, self._next_update)
        return min(n, self._n_wanted - len(self._in_flight))

    async def _run(self) -> None:
        try:
            while True:
                self._may_start.clear()
                await self._start_groups()
                if not self._pending.rollout_ids:
                    await self._may_start.wait()
                    continue
                for end in await self._pending.next_ends(self._may_start):
                    await self._collect(end)
        finally:
            async with self._changed:
                self._changed.notify_all()

    async def _start_groups(self) -> None:
        for _ in range(self._n_startable()):
            sample = self._draws.draw()
            if sample is None:
                self._has_samples = False
                break
            self._starting.append(sample)
        if self._starting:
            rollouts, inputs = await self._start(self._starting)
            by_group = groupby(inputs.items(), key=lambda item: item[1]["data_id"])
            for sample, (_, of_sample) in zip(self._starting, by_group, strict=True):
                group = Group(self._n_started, sample, dict(of_sample))
                self._n_started += 1
                self._in_flight.append(group)
                self._group_of |= dict.fromkeys(group.inputs, group)
            self._starting = []
            self._pending.add(rollouts)
        async with self._changed:
            self._changed.notify_all()

    async def _collect(self, end: Any) -> None:
        group = self._group_of[end.rollout_id]
        rollout = await self._source.finished_rollout(end, group.inputs[end.rollout_id])
        if rollout is None:
            self._pending.wait_again(end)
            return
        group.finished[end.rollout_id] = rollout
        if group.running or group not in self._in_flight:
            return
        group.complete_at = time.monotonic()
        group.version = None
        self._look_at_versions([group])
        self._n_generated += 1
        if not self._is_kept(group):
            self._put_aside(group, "no_reward_variance")
            self._may_start.set()
        async with self._changed:
            self._changed.notify_all()

    async def _drop_stale(self) -> int:
        stale = self._schedule.expired(self._in_flight, self._version)
        for group in stale:
            await self._cancel(group)
            self._put_aside(group, "stale")
        return len(stale)

    def _put_aside(self, group: Group, reason: str) -> None:
        self._in_flight.remove(group)
        self._set_aside.setdefault(reason, []).append(group)

    async def _cancel(self, group: Group) -> None:
        running = group.running
        self._pending.forget(running)
        for rollout_id in running:
            await self._source.give_up(rollout_id)


def _oldest(rollout: FinishedRollout) -> int | None:
    versions = [call.policy_version for call in rollout.calls if call.policy_version is not None]
    return min(versions, default=None)
