"""Rollouts that were announced to the proxy: whose calls are answered, and what they belong to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from agl_fast.proxy.sampling import Phase


@dataclass(slots=True, eq=False)
class AnnouncedRollout:
    """One rollout, from its announcement until it is closed.

    Attributes:
        phase: what it is for, and how its calls are sampled.
        policy_version: of the servers when it was announced; None: unknown. Each call has the
            version with which it was sent.
        is_refused: it has ended; further calls are not answered.
        is_closed: its answers are not recorded any more.
        recorded: calls that were recorded.
        unknown_models: how often the servers answered that they do not know a model, by the
            message for the agent.
    """

    phase: Phase
    policy_version: int | None = None
    is_refused: bool = False
    is_closed: bool = False
    recorded: int = 0
    unknown_models: Counter[str] = field(default_factory=Counter)


class AnnouncedRollouts:
    """The open rollouts. Methods may be called from any thread.

    Attributes:
        others: what calls belong to that name no announced rollout; None: they are refused.
    """

    def __init__(self) -> None:
        self.others: AnnouncedRollout | None = AnnouncedRollout(Phase())
        self._rollouts: dict[str, AnnouncedRollout] = {}
        self._n_announcing = 0

    @contextmanager
    def announcing(self) -> Iterator[None]:
        """Rollouts are about to be announced: calls of unknown ones wait until the block ends."""
        self._n_announcing += 1
        try:
            yield
        finally:
            self._n_announcing -= 1

    @property
    def are_coming(self) -> bool:
        return self._n_announcing > 0

    def announce(
        self, rollout_ids: Collection[str], phase: Phase, policy_version: int | None
    ) -> None:
        """Answer calls of these rollouts."""
        self._rollouts.update(
            {each: AnnouncedRollout(phase, policy_version) for each in rollout_ids}
        )

    def refuse(self, rollout_ids: Collection[str]) -> None:
        """Answer no further call of these rollouts."""
        for rollout_id in rollout_ids:
            if (rollout := self._rollouts.get(rollout_id)) is not None:
                rollout.is_refused = True

    def close(self, rollout_ids: Collection[str]) -> None:
        """Forget these rollouts; what is still answered of them is not recorded."""
        for rollout_id in rollout_ids:
            if (rollout := self._rollouts.pop(rollout_id, None)) is not None:
                rollout.is_refused = rollout.is_closed = True

    def find(self, rollout_id: str) -> AnnouncedRollout | None:
        """What a call of the rollout belongs to; None: it is refused."""
        rollout = self._rollouts.get(rollout_id, self.others)
        return None if rollout is None or rollout.is_refused else rollout

    def of(self, rollout_ids: Collection[str]) -> list[AnnouncedRollout]:
        """Those that are not closed."""
        return [self._rollouts[each] for each in rollout_ids if each in self._rollouts]

    @property
    def ids(self) -> set[str]:
        """Of all rollouts that are not closed."""
        return set(self._rollouts)
