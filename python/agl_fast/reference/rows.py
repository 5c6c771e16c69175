"""Chains become rows, cut to the limits; every sampled token ends in one class."""

from __future__ import annotations

from dataclasses import dataclass

from agl_fast.reference.chains import CONTEXT, Chain
from agl_fast.rows.accounting import Accounting
from agl_fast.rows.options import RowOptions


@dataclass
class Row:
    """A row of the batch; ``sampled_by`` and ``log_probs`` are parallel to ``response``.

    ``positions`` are those of prompt and response, one behind the other.
    """

    rollout_id: str
    data_id: str
    first_call: int
    prompt: list[int]
    response: list[int]
    sampled_by: list[int]
    log_probs: list[float | None]
    positions: list[int]
    is_dropped: bool
    score: float

    @property
    def response_mask(self) -> list[int]:
        return [int(call != CONTEXT) for call in self.sampled_by]

    @property
    def has_log_probs(self) -> bool:
        return all(
            log_prob is not None
            for log_prob, call in zip(self.log_probs, self.sampled_by, strict=True)
            if call != CONTEXT
        )


@dataclass(frozen=True)
class CutChain:
    """A chain inside the limits; without a sampled token its response is empty and it is no row."""

    first_call: int
    prompt: list[int]
    response: list[int]
    sampled_by: list[int]
    log_probs: list[float | None]
    is_overlong: bool  # marked by overlong_prompt="drop"
    n_sampled: int  # of the whole chain
    n_kept: int  # of them inside the limits


def cut(chain: Chain, options: RowOptions) -> CutChain:
    prompt = chain.prompt[: options.max_prompt_length]
    overflow = chain.prompt[options.max_prompt_length :]
    is_overlong = bool(overflow) and options.drops_overlong
    spilled = [] if is_overlong else overflow

    response = spilled + chain.response
    sampled_by = [CONTEXT] * len(spilled) + chain.sampled_by
    log_probs = [None] * len(spilled) + chain.log_probs

    end = options.max_response_length
    if options.max_total_length is not None:
        end = min(end, max(options.max_total_length - len(prompt), 0))
    end = min(end, len(response))
    while end > 0 and sampled_by[end - 1] == CONTEXT:
        end -= 1

    return CutChain(
        chain.first_call,
        prompt,
        response[:end],
        sampled_by[:end],
        log_probs[:end],
        is_overlong,
        chain.n_sampled,
        sum(call != CONTEXT for call in sampled_by[:end]),
    )


def is_truncated(chains: list[CutChain]) -> bool:
    """Whether the rollout of these chains lost a sampled token to the response options."""
    return any(chain.n_kept < chain.n_sampled and not chain.is_overlong for chain in chains)


def drop_reason(chain: CutChain, *, mask_rollout: bool) -> str | None:
    """Why the chain is marked, None where it is not."""
    if chain.is_overlong:
        return "overlong_prompt"
    if mask_rollout and chain.n_kept > 0:
        return "truncated_rollout"
    return None


def count(chain: CutChain, reason: str | None, accounting: Accounting) -> None:
    """Add the chain's sampled tokens to their classes (``sampled`` is counted with the calls)."""
    if chain.n_kept == 0:
        accounting.empty_rows += 1
    if reason is None:
        accounting.trained += chain.n_kept
        accounting.truncated += chain.n_sampled - chain.n_kept
    else:
        accounting.dropped += chain.n_sampled
        accounting.dropped_by_reason[reason] += chain.n_sampled
