"""The rollout hook and the credit strategies of calls."""

from agl_fast.rows.calls import trainable_calls
from agl_fast.training.credit.assignment import CreditAssignment, credit_assignment
from agl_fast.training.credit.hook import NamedHook, RolloutHook, load_hook
from agl_fast.training.credit.strategies import (
    STRATEGIES,
    discounted,
    identical,
    last_call,
    per_call,
)

__all__ = [
    "STRATEGIES",
    "CreditAssignment",
    "NamedHook",
    "RolloutHook",
    "credit_assignment",
    "discounted",
    "identical",
    "last_call",
    "load_hook",
    "per_call",
    "trainable_calls",
]
