"""Which runner processes belong to which run.

Every run has an id. Its runners carry the id in their worker names, its rollouts in their metadata;
the store of the run hands work to no other runner, and no other work to them. Runner processes end
with the process that started them.
"""

from agl_fast.verl.membership.guard import Guard
from agl_fast.verl.membership.identity import (
    JOIN_VARIABLE,
    ROLLOUT_KEY,
    JoinRefused,
    RunIdentity,
    current_run,
    knows_its_run,
    run_at,
    store_answer_limit,
)
from agl_fast.verl.membership.strategy import bind_runners_to_runs, require_free_port

__all__ = [
    "JOIN_VARIABLE",
    "ROLLOUT_KEY",
    "Guard",
    "JoinRefused",
    "RunIdentity",
    "bind_runners_to_runs",
    "current_run",
    "knows_its_run",
    "require_free_port",
    "run_at",
    "store_answer_limit",
]
