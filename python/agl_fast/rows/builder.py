"""Build batches from rollouts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from agl_fast import _core
from agl_fast.ops.argument_checks import INT32_MAX, integer
from agl_fast.ops.device import Buffers
from agl_fast.ops.fill import jagged, padded
from agl_fast.rows.accounting import EmptyBatchError, RolloutEntry
from agl_fast.rows.batch import Batch
from agl_fast.rows.calls import Call, LogProbs, PositionIds, Rollout, TokenIds
from agl_fast.rows.levels import LevelName
from agl_fast.rows.options import NO_LIMIT, RowKeywords, RowOptions, lists_row_options
from agl_fast.rows.planned import Counts, Pending, collect_mismatches
from agl_fast.rows.rewards import read_credit, read_reward
from agl_fast.rows.row_metrics import training_metrics

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)

_NO_BASE = -1

P = ParamSpec("P")
T = TypeVar("T")


def _one_at_a_time(
    method: Callable[Concatenate[BatchBuilder, P], T],
) -> Callable[Concatenate[BatchBuilder, P], T]:
    """Serialise the method: threads add rollouts while another one builds a batch."""

    @wraps(method)
    def locked(self: BatchBuilder, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked


class BatchBuilder:
    """Builds batches from rollouts that arrive one by one. Thread-safe.

    A rollout is planned when it is added, while others still run; ``finish`` only fills tensors.
    Repeated prompt tokens cost one pointer comparison each in lists, and nothing in arrays that
    are views of one base array.

    Args:
        options: fields of `RowOptions`.
        device: where the tensors live; None means the CPU.
        reuse_buffers: keep the output memory from batch to batch. ``finish`` then invalidates the
            tensors of the previous batch. This avoids the first touch of fresh memory, which costs
            more than writing the batch.

    Raises:
        TypeError, ValueError: an option has the wrong type or value; the message names it.
    """

    @lists_row_options(RowKeywords)
    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        reuse_buffers: bool = False,
        **options: Unpack[RowKeywords],
    ) -> None:
        self._options = RowOptions(**options)
        target = torch.device("cpu" if device is None else device)
        self._buffers = Buffers(target, reuse=reuse_buffers)
        self._planner = _core.Planner(self._options)
        self._pending: dict[str, Pending] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """Number of rollouts added since the last batch."""
        return len(self._pending)

    def add(self, rollout: Rollout) -> None:
        """Plan a complete rollout. An error leaves the builder unchanged.

        Raises:
            TypeError, ValueError: a field is wrong; the message names rollout, call, field, index
                and value.
            ValueError: the rollout_id is already in this batch.
        """
        self.add_many([rollout])

    @_one_at_a_time
    def add_many(self, rollouts: Iterable[Rollout]) -> None:
        """Plan rollouts on several threads. An error leaves the builder unchanged.

        Raises:
            TypeError, ValueError: as for ``add``.
        """
        added: dict[str, Pending] = {}
        all_calls: list[list[Call]] = []
        for rollout in rollouts:
            rollout_id, calls = _read_rollout(rollout)
            if rollout_id in self._pending or rollout_id in added:
                raise ValueError(f"rollout {rollout_id!r} is already in this batch")
            added[rollout_id] = Pending.of(rollout, calls, len(self._pending) + len(added))
            all_calls.append(calls)
        self._planner.add_many(list(added), all_calls)
        self._pending |= added

    @_one_at_a_time
    def add_call(
        self,
        rollout_id: str,
        base_call: int | None,
        keep: int,
        prompt_tail: TokenIds,
        response_ids: TokenIds,
        log_probs: LogProbs | None = None,
        reward: float | None = None,
        *,
        response_id: str | None = None,
        finish_reason: str | None = None,
        policy_version: int | None = None,
        sampling: Mapping[str, Any] | None = None,
        agent: str | None = None,
        trainable: bool = True,
        credit: float = 1.0,
        position_ids: PositionIds | None = None,
    ) -> None:
        """Append one call of a running rollout as a delta: shared-prefix length plus new tokens.

        The prompt is the first ``keep`` tokens of call ``base_call``'s prompt and response,
        followed by ``prompt_tail``. The first call opens the rollout; ``close_rollout`` completes
        it with its reward. An error leaves the builder unchanged.

        Args:
            rollout_id: id of a new or open rollout.
            base_call: index of an earlier call of the rollout; None: no base, and ``keep`` is 0.
            keep: number of tokens shared with the base call.
            prompt_tail: token ids after the shared prefix.
            response_ids, log_probs, …, position_ids: as for ``Call``; positions are those of the
                whole prompt and the response.

        Raises:
            TypeError, ValueError: as for ``add``.
        """
        pending = self._pending.get(rollout_id)
        if pending is not None and not pending.open:
            raise ValueError(f"rollout {rollout_id!r} is already complete in this batch")
        n_calls = 0 if pending is None else len(pending.call_rewards)
        where = f"rollout {rollout_id!r}, call {n_calls}"
        own = read_reward(reward, f"{where}: reward")
        credit = read_credit(credit, f"{where}: credit")
        call = Call(
            prompt_tail,
            response_ids,
            log_probs,
            reward,
            response_id=response_id,
            finish_reason=finish_reason,
            policy_version=policy_version,
            sampling=sampling,
            agent=agent,
            trainable=trainable,
            position_ids=position_ids,
        )
        base = (
            _NO_BASE
            if base_call is None
            else integer(f"{where}: base_call", base_call, 0, INT32_MAX)
        )
        keep = integer(f"{where}: keep", keep, 0, INT32_MAX)
        if pending is None:
            self._planner.open_with(rollout_id, base, keep, call)
            pending = Pending(rollout_id, rollout_id, None, None, len(self._pending), open=True)
            self._pending[rollout_id] = pending
        else:
            self._planner.add_call(pending.index, rollout_id, base, keep, call)
        pending.call_rewards.append(own)
        pending.call_credits.append(credit)
        pending.finish_reasons.append(finish_reason)
        pending.reward = pending.reward if own is None else own

    @_one_at_a_time
    def close_rollout(
        self,
        rollout_id: str,
        data_id: str,
        reward: float | None = None,
        *,
        status: str | None = None,
    ) -> None:
        """Complete a rollout that ``add_call`` opened.

        A rollout still open when the batch is built is its own group, with its rollout_id as
        data_id.

        Args:
            rollout_id: id of an open rollout.
            data_id, reward, status: as for ``Rollout``.

        Raises:
            ValueError: the rollout is not open, or the reward is infinite.
            TypeError: the reward is not a number.
        """
        pending = self._pending.get(rollout_id)
        if pending is None or not pending.open:
            raise ValueError(f"rollout {rollout_id!r} is not open in this batch")
        given = read_reward(reward, f"rollout {rollout_id!r}: reward")
        pending.data_id = data_id
        pending.status = status
        pending.reward = pending.reward if given is None else given
        pending.open = False

    @_one_at_a_time
    def finish(self) -> Batch:
        """Fill the tensors and start a new batch.

        Raises:
            ValueError: no rollout was added.
            EmptyBatchError: no rollout has a row; the builder starts a new batch.
        """
        if not self._pending:
            raise ValueError("no rollouts: add at least one before the batch is built")
        options = self._options
        pending = list(self._pending.values())
        fill = options.reward_fillna_value
        rewards = [fill if each.reward is None else each.reward for each in pending]
        rows = self._planner.rows(np.array(rewards, np.float32))
        counts = Counts(rows.counts)
        accounting = counts.total()
        entries = [
            each.entry(
                fill,
                n_rows,
                counts.of_rollout(index),
                truncated=truncated,
                zeroed=options.zeroes_truncated and truncated,
            )
            for index, (each, n_rows, truncated) in enumerate(
                zip(
                    pending,
                    counts.column("rows").tolist(),
                    counts.column("lost_tokens").astype(bool).tolist(),
                    strict=True,
                )
            )
        ]
        self._warn_of_missing_rewards(entries)
        mismatches = collect_mismatches(self._planner, self._pending, options.tokenizer)
        metrics = training_metrics(
            entries,
            accounting,
            self._planner.response_lengths(),
            counts.column("chains"),
            int(counts.column("cut_chains").sum()),
            mismatches if options.rules.merges_calls else None,
            [reason for each in pending for reason in each.finish_reasons],
        )
        if len(rows) == 0:
            self._clear()
            raise EmptyBatchError(
                f"none of {len(pending)} rollouts gave a row; {accounting}", accounting, metrics
            )
        batch = Batch(
            tensors=self._tensors(rows),
            columns=self._columns(rows, entries),
            rollouts=entries,
            accounting=accounting,
            mismatches=mismatches,
            metrics=metrics,
        )
        del rows  # lets the planner reuse its memory
        self._clear()
        return batch

    def _clear(self) -> None:
        self._planner.clear()
        self._pending.clear()

    def _warn_of_missing_rewards(self, entries: list[RolloutEntry]) -> None:
        missing = [entry.rollout_id for entry in entries if not entry.has_reward]
        if missing:
            logger.warning(
                "%d of %d rollouts have no reward and get %g, the first is %r",
                len(missing),
                len(entries),
                self._options.reward_fillna_value,
                missing[0],
            )

    def _tensors(self, rows: _core.Rows) -> dict[str, torch.Tensor]:
        options = self._options
        if options.layout == "jagged":
            tensors = jagged(rows, call_index=options.call_index, buffers=self._buffers)
        else:
            widths = (options.max_prompt_length, options.max_response_length)
            tensors = padded(
                rows,
                *(rows.longest if options.trims else widths),
                options.pad_token_id,
                call_index=options.call_index,
                buffers=self._buffers,
            )
        marked = torch.from_numpy(rows.marked.astype(bool))
        tensors["is_drop_mask"] = marked.to(self._buffers.device)
        return tensors

    def _columns(self, rows: _core.Rows, entries: list[RolloutEntry]) -> dict[str, NDArray[Any]]:
        owners = [entries[index] for index in rows.rollout.tolist()]
        first_call = rows.first_call.astype(np.int64)
        columns: dict[str, NDArray[Any]] = {
            "data_id_list": _column((entry.data_id for entry in owners), len(owners)),
            "rollout_id_list": _column((entry.rollout_id for entry in owners), len(owners)),
            "first_call_index_list": first_call,
            "has_rollout_log_probs": rows.has_log_probs.astype(bool),
        }
        if self._options.rules.row_is_call:
            columns["turn_index_list"] = first_call.copy()
        return columns


@lists_row_options(RowKeywords)
def build_batch(
    rollouts: Iterable[Rollout],
    *,
    device: torch.device | str | None = None,
    **options: Unpack[RowKeywords],
) -> Batch:
    """Turn rollouts into one PPO batch, as docs/rows.md specifies.

    Args:
        rollouts: in the order of their rows.
        device: where the tensors live; None means the CPU.
        options: fields of `RowOptions`. Required: ``max_prompt_length``, ``max_response_length``,
            ``pad_token_id``.

    Raises:
        TypeError, ValueError: an option, or a field of a rollout, is wrong; the message names it.
        EmptyBatchError: no call gave a row.
    """
    builder = BatchBuilder(device=device, **options)
    builder.add_many(rollouts)
    return builder.finish()


@dataclass(frozen=True, slots=True)
class FittingLimits:
    """The smallest limits at which no row of the rollouts is cut.

    Attributes:
        max_prompt_length: tokens of the longest first prompt, or the given P if prompts spill.
        max_response_length: tokens of the longest response at that P.
        max_total_length: tokens of the longest row.
    """

    max_prompt_length: int
    max_response_length: int
    max_total_length: int


def fitting_limits(
    rollouts: Iterable[Rollout], *, level: LevelName, spill_from: int | None = None
) -> FittingLimits:
    """Build rows without limits and measure them.

    Args:
        rollouts: with at least one row.
        level: of the rows.
        spill_from: P, if longer prompts spill into the response.

    Raises:
        EmptyBatchError: no rollout has a row.
    """
    batch = build_batch(
        rollouts,
        level=level,
        max_prompt_length=spill_from or NO_LIMIT,
        max_response_length=NO_LIMIT,
        pad_token_id=0,
        layout="jagged",
        overlong_prompt="drop" if spill_from is None else "spill",
    )
    prompts, responses = (_lengths(batch.tensors[name]) for name in ("prompts", "responses"))
    return FittingLimits(
        spill_from or int(prompts.max()),
        int(responses.max()),
        int((prompts + responses).max()),
    )


def _lengths(nested: Any) -> torch.Tensor:
    lengths: torch.Tensor = nested.offsets().diff()
    return lengths


def _read_rollout(rollout: Rollout) -> tuple[str, list[Call]]:
    if not hasattr(rollout, "rollout_id") or not hasattr(rollout, "calls"):
        raise TypeError(f"rollouts must be Rollout objects, got {rollout!r}")
    try:
        calls = list(rollout.calls)
        hash(rollout.rollout_id)
    except TypeError:
        raise TypeError(
            f"rollout {rollout.rollout_id!r}: calls must be a sequence of Call, and the rollout_id "
            f"a str; got {rollout.calls!r}"
        ) from None
    return rollout.rollout_id, calls


def _column(values: Iterable[Any], size: int) -> NDArray[Any]:
    """An object array (size,) that does not unpack tuples."""
    return np.fromiter(values, dtype=object, count=size)
