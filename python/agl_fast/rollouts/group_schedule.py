"""Which groups of rollouts a training step takes, and how many new ones may start.

Staleness is the number of policy versions between the oldest call of a group and the update that
trains it. A group that may not become staler is urgent: the step waits for it, so that rollouts
which take long are trained like short ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Scheduled(Protocol):
    """A group of rollouts of one sample.

    Attributes:
        number: its place in the order of starting.
        version: the policy version of its oldest call; None before the first call.
    """

    @property
    def number(self) -> int: ...

    @property
    def version(self) -> int | None: ...


GroupT = TypeVar("GroupT", bound=Scheduled)


@dataclass(frozen=True)
class GroupSchedule:
    """Limits of asynchronous collection.

    Args:
        n_groups: groups per step, `data.train_batch_size`.
        max_staleness: `agentlightning.collection.max_staleness`.
        oversample: `agentlightning.collection.oversample`; groups in flight, as a multiple of
            `n_groups`.
    """

    n_groups: int
    max_staleness: int
    oversample: float

    def slack(self, group: Scheduled, version: int) -> int:
        """The number of steps by which a group can be postponed; negative: it is too stale.

        Args:
            version: the policy version that the next update starts from.
        """
        oldest = version if group.version is None else group.version
        return self.max_staleness - (version - oldest)

    def step(
        self,
        complete: Sequence[GroupT],
        running: Iterable[Scheduled],
        version: int,
        *,
        waits: bool = True,
    ) -> list[GroupT] | None:
        """The groups that the next step trains, in the order of starting.

        The least slack goes first. The step waits while, without a running group, a later step
        would have more than `n_groups` groups that it may not postpone.

        Args:
            complete: groups whose rollouts have all ended.
            running: the others.
            version: the policy version that the update starts from.
            waits: False: take `n_groups` complete groups, whatever the others' staleness.

        Returns:
            `n_groups` groups, or all of them if there are fewer; None: wait for a running group.
        """
        running = list(running)
        n_taken = min(self.n_groups, len(complete) + len(running))
        by_slack = sorted(complete, key=lambda each: (self.slack(each, version), each.number))
        taken, postponed = by_slack[:n_taken], by_slack[n_taken:]
        if len(taken) < n_taken:
            return None
        others: list[Scheduled] = [*postponed, *running]
        slacks = sorted(self.slack(each, version) for each in others)
        # Of the k-th postponed group, k // n_groups steps come first.
        if waits and any(slack < 1 + k // self.n_groups for k, slack in enumerate(slacks)):
            return None
        return sorted(taken, key=lambda each: each.number)

    def expired(self, postponed: Iterable[GroupT], version: int) -> list[GroupT]:
        """The groups that would be too stale for the step after the one from `version`."""
        return [each for each in postponed if self.slack(each, version) < 1]

    def n_startable(self, in_flight: Sequence[Scheduled], version: int, next_update: int) -> int:
        """How many groups may start now.

        Args:
            in_flight: groups that no step has taken.
            version: the policy version that the servers hold.
            next_update: the version that the next update starts from: larger by one than `version`
                while an update runs.
        """
        n_by_staleness = (self.max_staleness - (next_update - version) + 1) * self.n_groups
        n_by_oversample = math.floor(self.oversample * self.n_groups + 1e-9)
        return max(0, min(n_by_staleness, n_by_oversample) - len(in_flight))
