"""Rows: cut from chains, counted by class, and written as tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agl_fast.reference.chains import CONTEXT, Chain
from agl_fast.reference.pad import (
    get_left_padded_ids_and_attention_mask,
    get_right_padded_ids_and_attention_mask,
)
from agl_fast.rows.accounting import Accounting
from agl_fast.rows.options import RowOptions


@dataclass
class Row:
    """A row of the batch; ``sampled_by`` and ``log_probs`` are parallel to ``response``.

    ``positions`` are those of prompt and response, one behind the other. ``given_positions`` are
    the same in several dimensions, if the row's last call has them.
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
    given_positions: list[list[int]] | None = None

    def positions_in(self, dimensions: int | None) -> list[list[int]]:
        """One list per dimension; None means one."""
        return self.given_positions or [self.positions] * (dimensions or 1)

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
    """A chain cut to the limits; without a sampled token it has no row."""

    first_call: int
    prompt: list[int]
    response: list[int]
    sampled_by: list[int]
    log_probs: list[float | None]
    is_overlong: bool  # marked by overlong_prompt="drop"
    n_sampled: int  # of the whole chain
    n_kept: int  # of them inside the limits
    positions: list[list[int]] | None  # of prompt and response, one list per dimension


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

    begin = len(chain.prompt) - len(spilled)  # of the response in the context
    return CutChain(
        chain.first_call,
        prompt,
        response[:end],
        sampled_by[:end],
        log_probs[:end],
        is_overlong,
        chain.n_sampled,
        sum(call != CONTEXT for call in sampled_by[:end]),
        _positions_of(chain, [*range(len(prompt)), *range(begin, begin + end)]),
    )


def _positions_of(chain: Chain, tokens: list[int]) -> list[list[int]] | None:
    """Positions of some tokens of the context, one list per dimension."""
    if chain.positions is None:
        return None
    return [[dimension[token] for token in tokens] for dimension in chain.positions]


def is_truncated(chains: list[CutChain]) -> bool:
    """Whether the rollout of these chains lost a sampled token to the response limits."""
    return any(chain.n_kept < chain.n_sampled and not chain.is_overlong for chain in chains)


def drop_reason(chain: CutChain, *, mask_rollout: bool) -> str | None:
    """Why the chain is excluded from the update; None if it is not."""
    if chain.is_overlong:
        return "overlong_prompt"
    if mask_rollout and chain.n_kept > 0:
        return "truncated_rollout"
    return None


def count(chain: CutChain, reason: str | None, accounting: Accounting) -> None:
    """Count the chain's sampled tokens by class (``sampled`` is counted per call)."""
    if chain.n_kept == 0:
        accounting.empty_rows += 1
    if reason is None:
        accounting.trained += chain.n_kept
        accounting.truncated += chain.n_sampled - chain.n_kept
    else:
        accounting.dropped += chain.n_sampled
        accounting.dropped_by_reason[reason] += chain.n_sampled


def padded_tensors(
    rows: list[Row],
    *,
    prompt_width: int,
    response_width: int,
    pad_token_id: int,
    call_index: bool,
    n_dimensions: int | None,
) -> dict[str, Any]:
    """Padded tensors as lists of B lists; ``is_drop_mask`` is a list of B.

    With ``n_dimensions``, ``position_ids`` has a list per dimension for each row.
    """

    def right_padded(values: list[Any], filler: Any) -> list[Any]:
        return values + [filler] * (response_width - len(values))

    tensors: dict[str, Any] = {
        "prompts": [],
        "responses": [],
        "input_ids": [],
        "attention_mask": [],
        "position_ids": [],
        "response_mask": [],
        "token_level_scores": [],
        "is_drop_mask": [row.is_dropped for row in rows],
    }
    for row in rows:
        prompt, prompt_attention = get_left_padded_ids_and_attention_mask(
            row.prompt, prompt_width, pad_token_id
        )
        response, response_attention = get_right_padded_ids_and_attention_mask(
            row.response, response_width, pad_token_id
        )
        attention_mask = prompt_attention + response_attention
        tensors["prompts"].append(prompt)
        tensors["responses"].append(response)
        tensors["input_ids"].append(prompt + response)
        tensors["attention_mask"].append(attention_mask)
        left, right = prompt_width - len(row.prompt), response_width - len(row.response)
        positions = [
            [0] * left + dimension + dimension[-1:] * right
            for dimension in row.positions_in(n_dimensions)
        ]
        tensors["position_ids"].append(positions[0] if n_dimensions is None else positions)
        tensors["response_mask"].append(right_padded(row.response_mask, 0))
        tensors["token_level_scores"].append(right_padded(_scores(row), 0.0))
    if call_index:
        tensors["call_index"] = [right_padded(row.sampled_by, CONTEXT) for row in rows]
    if _any_log_probs(rows):
        tensors["rollout_log_probs"] = [right_padded(_log_probs(row), 0.0) for row in rows]
    return tensors


def jagged_tensors(
    rows: list[Row], *, call_index: bool, n_dimensions: int | None
) -> dict[str, Any]:
    """Tensors without padding: lists of B lists of different lengths."""
    tensors: dict[str, Any] = {
        "prompts": [row.prompt for row in rows],
        "responses": [row.response for row in rows],
        "input_ids": [row.prompt + row.response for row in rows],
        "position_ids": [
            row.positions if n_dimensions is None else row.positions_in(n_dimensions)
            for row in rows
        ],
        "response_mask": [row.response_mask for row in rows],
        "token_level_scores": [_scores(row) for row in rows],
        "is_drop_mask": [row.is_dropped for row in rows],
    }
    if call_index:
        tensors["call_index"] = [row.sampled_by for row in rows]
    if _any_log_probs(rows):
        tensors["rollout_log_probs"] = [_log_probs(row) for row in rows]
    return tensors


def columns(rows: list[Row], *, row_is_call: bool) -> dict[str, list[Any]]:
    """Columns as lists of B."""
    first_calls = [row.first_call for row in rows]
    return {
        "data_id_list": [row.data_id for row in rows],
        "rollout_id_list": [row.rollout_id for row in rows],
        **({"turn_index_list": first_calls} if row_is_call else {}),
        "first_call_index_list": first_calls,
        "has_rollout_log_probs": [row.has_log_probs for row in rows],
    }


def _scores(row: Row) -> list[float]:
    # A row ends with a sampled token, as trailing context is cut.
    return [0.0] * (len(row.response) - 1) + [row.score]


def _log_probs(row: Row) -> list[float]:
    return [0.0 if log_prob is None else log_prob for log_prob in row.log_probs]


def _any_log_probs(rows: list[Row]) -> bool:
    return any(log_prob is not None for row in rows for log_prob in row.log_probs)
