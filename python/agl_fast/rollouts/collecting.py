"""Asynchronous collection by a daemon: groups of rollouts in flight across training steps."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

from agl_fast.proxy.llm_proxy import LLMProxy
from agl_fast.rollouts.batch_runner import CollectedStep, RunningBatch
from agl_fast.rollouts.collector import Collector, Draws, Group
from agl_fast.rollouts.finished import FailedRollouts, FinishedRollout, rollout_for_training
from agl_fast.rollouts.group_schedule import GroupSchedule
from agl_fast.rollouts.progress import PendingRollouts, Source
from agl_fast.rollouts.rollout_metrics import ProxyCounts
from agl_fast.rollouts.training_rows import TrainingRows
from agl_fast.verl.supervision.deadlines import Deadlines
from agl_fast.verl.supervision.loop_thread import LoopThread
from agl_fast.verl.supervision.waits import Limit


class CollectsGroups(ABC):
    """The methods of `AgentModeDaemon` for asynchronous collection, and what they use of it."""

    check: Callable[[], None] | None
    failed_rollouts: FailedRollouts
    llm_proxy: LLMProxy
    policy_version: int
    reward_fillna_value: float
    _batches: list[RunningBatch]
    _collected: CollectedStep | None = None
    _collector: Collector | None = None
    _deadlines: Deadlines
    _loop: LoopThread | None
    _new_rows: Callable[[], TrainingRows]
    _proxy_counts: ProxyCounts
    _source: Source

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    async def _use_servers(self, server_addresses: list[str]) -> None: ...

    @abstractmethod
    def _require_enqueueable(self, samples: list[dict[str, Any]]) -> None: ...

    @abstractmethod
    async def _enqueue(
        self, samples: list[dict[str, Any]], phase: Literal["train", "val"]
    ) -> tuple[list[Any], dict[str, dict[str, Any]]]: ...

    @abstractmethod
    def _pending(self, rollouts: Sequence[Any]) -> PendingRollouts: ...

    @abstractmethod
    def _take(self, batch: RunningBatch | CollectedStep, rollout: FinishedRollout) -> None: ...

    @abstractmethod
    def _observe(
        self, rollout: FinishedRollout, policy_version: int, *, is_train: bool
    ) -> None: ...

    def begin_collection(
        self,
        draws: Draws,
        server_addresses: Sequence[str],
        schedule: GroupSchedule,
        *,
        n_steps: int,
        filters_groups: bool = False,
        max_generated_groups: int | None = None,
        on_stale: Literal["train", "drop"] = "train",
    ) -> None:
        """Keep groups of training rollouts in flight until `end_collection`.

        A step::

            daemon.collect_groups()
            batch, metrics = daemon.training_batch(2048, 4096, "cpu", global_step)
            ...  # update
            daemon.hold(5.0)
            ...  # new weights for the servers
            daemon.release(policy_version)

        Args:
            draws: the samples.
            server_addresses: as in `set_up_data_and_server`.
            schedule: limits of groups in flight.
            n_steps: steps that are left to train.
            filters_groups: replace groups whose rollouts all have the same reward.
            max_generated_groups, on_stale: as in `Collector`.
        """
        self.start()
        assert self._loop is not None
        self._collector = Collector(
            self._source,
            self._pending(()),
            start=self._start_groups,
            schedule=schedule,
            draws=draws,
            oldest_version=self.llm_proxy.recorder.oldest_version,
            is_kept=self._has_reward_variance if filters_groups else lambda group: True,
            max_generated=max_generated_groups,
            on_stale=on_stale,
        )
        begin = self._begin_collection(self._collector, list(server_addresses), n_steps)
        limit = self._deadlines.enqueue
        self._loop.run(begin, what="starting to collect rollouts", limit=limit)

    async def _begin_collection(
        self, collector: Collector, server_addresses: list[str], n_steps: int
    ) -> None:
        await self._use_servers(server_addresses)
        self.llm_proxy.repeatable = True
        self._proxy_counts.begin(is_train=True)
        await collector.begin(self.policy_version, n_steps)

    async def _start_groups(
        self, samples: list[dict[str, Any]]
    ) -> tuple[list[Any], dict[str, dict[str, Any]]]:
        self._require_enqueueable(samples)
        return await self._enqueue(samples, "train")

    def _has_reward_variance(self, group: Group) -> bool:
        trained = [rollout_for_training(each, self.failed_rollouts) for each in group.rollouts]
        rewards = {
            self.reward_fillna_value if each.reward is None else each.reward
            for each in trained
            if each is not None
        }
        return len(rewards) > 1

    def collect_groups(self) -> CollectedStep:
        """Wait for the groups that the next step trains, for `training_batch`.

        Raises:
            As `run_until_all_finished`.
        """
        collector = self._collector
        if collector is None or self._loop is None:
            raise RuntimeError("no rollouts are collected: call begin_collection")
        what = "waiting for groups of rollouts"
        collected = self._loop.run(collector.take(), what=what, meanwhile=self.check)
        finished = [each for group in collected.groups for each in group.rollouts]
        step = CollectedStep(
            finished,
            collector.unknown_rollouts,
            collected.counts,
            self.policy_version,
            self._new_rows(),
            collected.is_last,
            min((group.started_at for group in collected.groups), default=time.time()),
        )
        for reason, groups in collected.set_aside.items():
            rollouts = [each for group in groups for each in group.rollouts]
            for each in rollouts:
                self._observe(each, step.policy_version, is_train=True)
            step.rows.set_aside(rollouts, reason)
        for each in finished:
            self._take(step, each)
        if finished:
            self.llm_proxy.require_known_model(step.rollout_ids)
        self._collected = step
        return step

    def hold(self, drain_seconds: float) -> None:
        """Let no call reach the servers until `release`.

        Args:
            drain_seconds: how long calls in flight may finish. The proxy aborts the rest and
                repeats them after `release`.
        """
        assert self._loop is not None
        hold = self.llm_proxy.hold(drain_seconds)
        limit = Limit(drain_seconds + self._deadlines.cancel.seconds)
        self._loop.run(hold, what="holding calls", limit=limit)

    def release(self, policy_version: int) -> None:
        """The servers hold a new policy version: waiting calls go on, new groups start."""
        assert self._loop is not None
        self._loop.run(self._release(policy_version), what="releasing calls")

    async def _release(self, policy_version: int) -> None:
        await self.llm_proxy.release(policy_version)
        if self._collector is not None:
            await self._collector.updated(policy_version)

    def look_at_samples(self, look: Callable[[list[dict[str, Any]]], None]) -> None:
        """Call `look` on the daemon's thread, with the samples in flight, while none is drawn."""
        if self._collector is None or self._loop is None:
            raise RuntimeError("no rollouts are collected: call begin_collection")
        limit = self._deadlines.checkpoint
        self._loop.run(self._collector.look(look), what="saving the samples", limit=limit)

    def end_collection(self) -> None:
        """Cancel the rollouts in flight."""
        collector, self._collector, self._collected = self._collector, None, None
        if collector is None or self._loop is None:
            return
        limit = self._deadlines.cancel
        self._loop.run(self._end_collection(collector), what="cancelling rollouts", limit=limit)

    async def _end_collection(self, collector: Collector) -> None:
        rollout_ids = [each for group in collector.in_flight for each in group.inputs]
        self.llm_proxy.refuse(rollout_ids)
        await collector.end()
        self.llm_proxy.repeatable = False
        if not self._batches:
            await self.llm_proxy.pause()
        await self.llm_proxy.close(rollout_ids)
