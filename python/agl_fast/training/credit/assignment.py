"""What becomes of a rollout between the store and the rows: the hook, then credit."""

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
    """Applied to every training rollout.

    Attributes:
        hook: None: the rollouts as they are.
        strategy: says what the calls of each of them learn from.
    """

    hook: NamedHook | None = None
    strategy: Callable[[agl_fast.Rollout], agl_fast.Rollout] = identical

    def __call__(self, rollout: agl_fast.Rollout) -> list[agl_fast.Rollout]:
        """The rollouts that take its place; none where the hook leaves it out.

        Raises:
            RuntimeError, TypeError, ValueError: of the hook.
        """
        rollouts = [rollout] if self.hook is None else self.hook(rollout)
        return [self.strategy(each) for each in rollouts]


def credit_assignment(settings: Any) -> CreditAssignment:
    """As `agentlightning` of the configuration says.

    Raises:
        ValueError: there is no such hook. TypeError: it cannot be called.
    """
    path = settings.get("rollout_hook")
    strategy: Callable[[agl_fast.Rollout], agl_fast.Rollout]
    if settings.credit == "discounted":
        strategy = partial(discounted, discount=settings.credit_discount)
    else:
        strategy = STRATEGIES[settings.credit]
    return CreditAssignment(None if path is None else load_hook(path), strategy)
