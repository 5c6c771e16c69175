"""The rollout hook, then the credit strategy, on every training rollout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import agl_fast
from agl_fast.training.credit.hook import NamedHook, load_hook
from agl_fast.training.credit.strategies import STRATEGIES, discounted, identical


@dataclass(frozen=True)
class CreditAssignment:
    """The hook and the credit strategy of a run.

    Attributes:
        hook: None leaves rollouts unchanged.
        strategy: assigns credit or rewards to the calls of a rollout.
    """

    hook: NamedHook | None = None
    strategy: Callable[[agl_fast.Rollout], agl_fast.Rollout] = identical

    def __call__(self, rollout: agl_fast.Rollout) -> list[agl_fast.Rollout]:
        """The rollouts to train in place of this one; none if the hook removes it.

        Raises:
            RuntimeError, TypeError, ValueError: the hook failed (`NamedHook`).
        """
        rollouts = [rollout] if self.hook is None else self.hook(rollout)
        return [self.strategy(each) for each in rollouts]


def credit_assignment(settings: Any) -> CreditAssignment:
    """The credit assignment of a run.

    Args:
        settings: `agentlightning` of the configuration.

    Raises:
        ValueError: the hook does not exist. TypeError: it is not callable.
    """
    path = settings.get("rollout_hook")
    strategy: Callable[[agl_fast.Rollout], agl_fast.Rollout]
    if settings.credit == "discounted":
        strategy = partial(discounted, discount=settings.credit_discount)
    else:
        strategy = STRATEGIES[settings.credit]
    return CreditAssignment(None if path is None else load_hook(path), strategy)
