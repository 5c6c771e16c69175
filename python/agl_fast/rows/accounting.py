"""Accounting: every sampled token by class, per rollout and in total."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Why a sampled token was dropped, in the order of the rules (docs/rows.md).
DROP_REASONS = (
    "aborted",
    "excluded",
    "empty",
    "overlong_prompt",
    "truncated_rollout",
    "overlong_call",
)

# Kinds of broken prefixes (docs/rows.md, "Mismatches").
MISMATCH_KINDS = (
    "shortened",
    "retokenised",
    "generation_prompt",
    "new_conversation",
    "history_rewritten",
    "positions_changed",
)


@dataclass(slots=True)
class Accounting:
    """Sampled tokens by class.

    ``sampled == trained + truncated + dropped + duplicate`` always holds.

    Attributes:
        sampled: response tokens of all calls.
        trained: tokens with mask 1 in a row of the update.
        truncated: tokens past the response limits.
        dropped: tokens excluded for a reason of ``DROP_REASONS``.
        duplicate: tokens of calls that repeat the ``response_id``, prompt ids and response ids of
            an earlier call of the rollout.
        dropped_by_reason: ``dropped`` split by reason, every reason present.
        empty_calls: calls without prompt or without response tokens.
        empty_rows: chains left without a token to train.
        response_id_clashes: calls with the ``response_id`` of an earlier call of the rollout but
            other ids. They are separate calls.
    """

    sampled: int = 0
    trained: int = 0
    truncated: int = 0
    dropped: int = 0
    duplicate: int = 0
    dropped_by_reason: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(DROP_REASONS, 0)
    )
    empty_calls: int = 0
    empty_rows: int = 0
    response_id_clashes: int = 0

    def __add__(self, other: Accounting) -> Accounting:
        return Accounting(
            self.sampled + other.sampled,
            self.trained + other.trained,
            self.truncated + other.truncated,
            self.dropped + other.dropped,
            self.duplicate + other.duplicate,
            {k: n + other.dropped_by_reason[k] for k, n in self.dropped_by_reason.items()},
            self.empty_calls + other.empty_calls,
            self.empty_rows + other.empty_rows,
            self.response_id_clashes + other.response_id_clashes,
        )


@dataclass(slots=True)
class RolloutEntry:
    """One entry of the rollout table, from which advantages are computed.

    Attributes:
        rollout_id, data_id: as given; rollouts with one data_id form a group.
        reward: the final reward after filling and ``truncated_rollouts="zero_reward"``.
        has_reward: False if ``reward`` is the fill value.
        n_calls, n_rows: number of calls and rows; rows may be 0.
        accounting: the rollout's sampled tokens by class.
        truncated: whether a sampled token was lost to a response limit.
        status: as given.
        call_rewards: one entry per call, as given; None if no call has one, or if ``reward`` was
            zeroed.
        call_credits: one entry per call, as given; None if all are 1.
    """

    rollout_id: str
    data_id: str
    reward: float
    has_reward: bool
    n_calls: int
    n_rows: int
    accounting: Accounting
    truncated: bool
    status: str | None
    call_rewards: tuple[float | None, ...] | None = None
    call_credits: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A broken prefix: a call that extends no open chain although one exists.

    Attributes:
        rollout_id, call: the call, by its index in ``rollout.calls``.
        index: first prompt index whose token or position differs from the closest open chain.
        kind: one of ``MISMATCH_KINDS``.
    """

    rollout_id: str
    call: int
    index: int
    kind: str


class EmptyBatchError(ValueError):
    """No call has a row.

    Attributes:
        accounting: the sampled tokens by class.
        metrics: the ``training/*`` metrics of the batch.
    """

    def __init__(
        self, message: str, accounting: Accounting, metrics: Mapping[str, float] | None = None
    ) -> None:
        super().__init__(message)
        self.accounting = accounting
        self.metrics = dict(metrics or {})

    def __reduce__(
        self,
    ) -> tuple[type[EmptyBatchError], tuple[str, Accounting, dict[str, float]]]:
        # Exceptions pickle their args only, that is the message.
        return type(self), (str(self), self.accounting, self.metrics)
