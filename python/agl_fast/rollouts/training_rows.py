"""Finished rollouts to the rows of a training step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import agl_fast
from agl_fast.proxy.engines import DEFAULT_ENGINE, Engine, engine_named
from agl_fast.proxy.sampling import SamplingPolicy, bent_by, deviations
from agl_fast.rollouts.finished import (
    FailedRollouts,
    has_failed,
    n_sampled_tokens,
    rollout_for_training,
)
from agl_fast.rollouts.mismatch_log import MismatchLog
from agl_fast.rows.builder import fitting_limits
from agl_fast.rows.mismatches import causes_of
from agl_fast.rows.options import NO_LIMIT, RowOptions
from agl_fast.rows.token_summary import FITTING, MISMATCH_CAUSES
from agl_fast.training.credit import CreditAssignment, NamedHook

logger = logging.getLogger(__name__)

# Column of a batch that the audit reads.
BENT_CALLS = "bent_calls_list"
# Column of a batch whose calls have several policy versions.
CALL_VERSIONS = "call_policy_versions_list"
# Mismatches per step whose text is decoded to determine the cause.
_DECODED_A_STEP = 64
_OF_LIMITS = ("overlong_prompt", "overlong_call", "truncated_rollout")
# Until the step's widths are known.
_WIDTHS = {"max_prompt_length": 1, "max_response_length": 1}


class TrainingRows:
    """Build the batch of each training step; rollouts are planned while others still run.

    Args:
        trace_aggregator: ``agentlightning.trace_aggregator`` of the configuration.
        failed_rollouts: ``skip`` or ``zero`` (`rollout_for_training`).
        credit: the rollout hook and the credit strategy.
        policy: sampling parameters of training; the column ``bent_calls_list`` lists calls that
            were sampled with others.
        engine: of the servers.
        options: further keywords of ``BatchBuilder``.
    """

    def __init__(
        self,
        trace_aggregator: Mapping[str, Any],
        failed_rollouts: FailedRollouts,
        *,
        credit: CreditAssignment,
        tokenizer: Any,
        policy: SamplingPolicy | None = None,
        engine: Engine | None = None,
        **options: Any,
    ) -> None:
        # Validate the options now, not after the first rollouts.
        row_options = RowOptions.from_config(
            {"agentlightning": {"trace_aggregator": trace_aggregator}}, **_WIDTHS, **options
        )
        debug = trace_aggregator.get("debug")
        # Needed to tell retokenised text from rewritten history; slow.
        decodes = debug and row_options.rules.merges_calls
        self._options = replace(
            row_options,
            call_index=True,  # for losses that average over calls
            tokenizer=tokenizer if decodes else None,
        )
        self._tokenizer = tokenizer
        self._mismatch_log: MismatchLog | None = None
        if debug and trace_aggregator.get("mismatch_log_dir"):
            self._mismatch_log = MismatchLog(trace_aggregator["mismatch_log_dir"], tokenizer)
        self._failed_rollouts = failed_rollouts
        self._credit = credit
        self._policy = policy
        self._engine = engine or engine_named(DEFAULT_ENGINE)
        self._kept: list[agl_fast.Rollout] = []
        self._ids: set[str] = set()  # of rollouts that a hook returned
        self._builder: agl_fast.BatchBuilder | None = None
        self._built_for: Any = None  # limits and device of the builder
        self._said_savings = False
        self.counts: Counter[str] = Counter()

    def add(self, rollout: agl_fast.Rollout) -> None:
        """Add a rollout, or count it as skipped.

        Raises:
            TypeError, ValueError: a field is wrong; the message names it.
            RuntimeError: the user's hook raised.
        """
        training = rollout_for_training(rollout, self._failed_rollouts)
        if training is None:
            reason = "failed" if has_failed(rollout) else "no_trainable_call"
            self._count_skipped(reason, rollouts=1, tokens=n_sampled_tokens(rollout))
            return
        if self._credit.hook is not None:  # which may change calls in place
            training.calls = [copy(call) for call in training.calls]
        kept = self._credit(training)
        if self._credit.hook is not None:
            self._refuse_known_ids(kept, self._credit.hook)
            lost = max(0, n_sampled_tokens(rollout) - sum(map(n_sampled_tokens, kept)))
            self._count_skipped("rollout_hook", rollouts=int(not kept), tokens=lost)
        if self._builder is not None:
            self._builder.add_many(kept)
        self._kept += kept

    def set_aside(self, rollouts: Sequence[agl_fast.Rollout], reason: str) -> None:
        """Count rollouts that are not trained."""
        n_tokens = sum(map(n_sampled_tokens, rollouts))
        self._count_skipped(reason, rollouts=len(rollouts), tokens=n_tokens)

    def _count_skipped(self, reason: str, *, rollouts: int, tokens: int) -> None:
        for name, count in (("skipped_rollouts", rollouts), ("skipped_tokens", tokens)):
            self.counts[name] += count
            self.counts[f"{name}/{reason}"] += count

    def _refuse_known_ids(self, rollouts: Sequence[agl_fast.Rollout], hook: NamedHook) -> None:
        for rollout in rollouts:
            if rollout.rollout_id in self._ids:
                raise hook.refuse_known_id(rollout.rollout_id)
            self._ids.add(rollout.rollout_id)

    def clear(self) -> None:
        """Remove all rollouts."""
        if self._builder is not None and len(self._builder):
            self._builder = None
        self._kept.clear()
        self._ids.clear()
        self.counts.clear()

    def build(
        self,
        max_prompt_length: int,
        max_response_length: int,
        device: torch.device | str | None,
        step: int | None = None,
    ) -> agl_fast.Batch:
        """Build the batch of all added rollouts.

        Args:
            step: the trainer's, for the mismatch log.

        Raises:
            EmptyBatchError: no rollout gave a row.
        """
        limits = {
            "max_prompt_length": max_prompt_length,
            "max_response_length": max_response_length,
        }
        if not self._kept:
            raise agl_fast.EmptyBatchError(
                "no rollout to train on", agl_fast.Accounting(), {"training/n_rollouts": 0}
            )
        if self._builder is None or (limits, device) != self._built_for or not len(self._builder):
            self._built_for = (limits, device)
            self._builder = agl_fast.BatchBuilder(device=device, **self._options.keywords(**limits))
            self._builder.add_many(self._kept)
        batch = self._builder.finish()
        batch.columns.update(policy_version_columns(self._kept, batch))
        bent = bent_calls(self._kept, batch.columns["rollout_id_list"], self._policy, self._engine)
        if bent is not None:
            batch.columns[BENT_CALLS] = bent
        if _took_tokens(batch.accounting):
            batch.metrics.update(self._fitting_limits(max_prompt_length))
        if batch.mismatches and self._tokenizer is not None:
            causes = causes_of(batch.mismatches, self._kept, self._tokenizer, _DECODED_A_STEP)
            batch.metrics.update({f"{MISMATCH_CAUSES}{cause}": n for cause, n in causes.items()})
        if self._mismatch_log is not None:
            self._log_mismatches(self._mismatch_log, batch, step)
        if self._options.rules.row_is_call and not self._said_savings:
            self._said_savings = True
            if not _took_tokens(batch.accounting):  # otherwise each level would lose other tokens
                self._say_savings(batch)
        return batch

    def _log_mismatches(self, log: MismatchLog, batch: agl_fast.Batch, step: int | None) -> None:
        """Write the log; a full disk ends the log, not the run."""
        try:
            log.write(batch.mismatches, self._kept, step)
        except OSError as error:
            logger.warning("Mismatches are only counted from here on: %s", error)
            self._mismatch_log = None

    def _fitting_limits(self, max_prompt_length: int) -> dict[str, float]:
        """Metrics of the smallest limits that remove no token."""
        if self._options.rules.is_tree:
            longest = max(
                len(call.prompt_ids) + len(call.response_ids)
                for rollout in self._kept
                for call in rollout.calls
            )
            return {f"{FITTING}tree_max_tokens": longest}
        fitting = fitting_limits(
            self._kept,
            level=self._options.level,
            spill_from=None if self._options.drops_overlong else max_prompt_length,
        )
        limits = {
            "max_prompt_length": fitting.max_prompt_length,
            "max_response_length": fitting.max_response_length,
        }
        if self._options.max_total_length is not None:
            limits["max_total_length"] = fitting.max_total_length
        return {f"{FITTING}{name}": value for name, value in limits.items()}

    def _say_savings(self, batch: agl_fast.Batch) -> None:
        merged = agl_fast.build_batch(
            self._kept,
            level="trajectory",
            layout="jagged",
            max_prompt_length=NO_LIMIT,
            max_response_length=NO_LIMIT,
            pad_token_id=self._options.pad_token_id,
        )
        now = int(batch.tensors["attention_mask"].sum())
        then = merged.tensors["input_ids"].values().numel()
        logger.info(
            "level transition forwards %d tokens in %d rows in this first step; level trajectory "
            "would have forwarded %d in %d (%.0f%% less), from the same calls",
            now,
            len(batch),
            then,
            len(merged),
            100 * (1 - then / now),
        )


def policy_version_columns(
    rollouts: Sequence[agl_fast.Rollout], batch: agl_fast.Batch
) -> dict[str, NDArray[Any]]:
    """The oldest and the newest policy version that sampled each row's tokens.

    Args:
        rollouts: of the batch, with their calls' `policy_version`.
        batch: padded, with call_index.

    Returns:
        `policy_version_min_list` and `policy_version_max_list`, (B,) int64; -1 in both if the
        version of one of the row's calls is unknown. If versions differ, also
        `call_policy_versions_list`, (B,) objects: the version of each call of the row's rollout,
        (calls,) int64.
    """
    of_calls = {
        rollout.rollout_id: np.array(
            [-1 if call.policy_version is None else call.policy_version for call in rollout.calls],
            dtype=np.int64,
        )
        for rollout in rollouts
    }
    versions = np.unique(np.concatenate(list(of_calls.values())))
    oldest = np.full(len(batch), versions[0], dtype=np.int64)
    newest = oldest.copy()
    if len(versions) > 1:  # asynchronous collection
        calls, mask = (batch.tensors[name].cpu() for name in ("call_index", "response_mask"))
        for row, rollout_id in enumerate(batch.columns["rollout_id_list"]):
            of_row = of_calls[rollout_id][torch.unique(calls[row][mask[row] != 0]).numpy()]
            oldest[row] = of_row.min()
            newest[row] = -1 if oldest[row] == -1 else of_row.max()
    columns = {"policy_version_min_list": oldest, "policy_version_max_list": newest}
    if len(versions) > 1:
        columns[CALL_VERSIONS] = np.empty(len(batch), dtype=object)
        for row, rollout_id in enumerate(batch.columns["rollout_id_list"]):
            columns[CALL_VERSIONS][row] = of_calls[rollout_id]
    return columns


def bent_calls(
    rollouts: Sequence[agl_fast.Rollout],
    rollout_ids: NDArray[Any],
    policy: SamplingPolicy | None,
    engine: Engine,
) -> NDArray[Any] | None:
    """The column `bent_calls_list`: calls sampled from another distribution than the trainer's.

    Args:
        rollouts: with their calls' `sampling`, as the proxy recorded it.
        rollout_ids: (B,) of the batch's rows.
        policy: the sampling parameters with which the trainer computes log-probs; None: each call's
            own, except for parameters that the trainer never applies.
        engine: of the servers that answered.

    Returns:
        (B,) objects: for each row, the deviating parameters' names by call index of its rollout.
        None if no call deviates.
    """
    by_rollout = {each.rollout_id: _deviations(each, policy, engine) for each in rollouts}
    if not any(by_rollout.values()):
        return None
    column = np.empty(len(rollout_ids), dtype=object)
    for row, rollout_id in enumerate(rollout_ids):
        column[row] = by_rollout.get(rollout_id, {})
    return column


def _deviations(
    rollout: agl_fast.Rollout, policy: SamplingPolicy | None, engine: Engine
) -> Mapping[int, tuple[str, ...]]:
    deviating = {}
    for index, call in enumerate(rollout.calls):
        if call.sampling is None:  # not recorded
            continue
        names = dict.fromkeys(bent_by(call.sampling, engine))
        if policy is not None:
            names |= dict.fromkeys(deviations(call.sampling, policy, engine))
        if names:
            deviating[index] = tuple(sorted(names))
    return deviating


def _took_tokens(accounting: agl_fast.Accounting) -> bool:
    """Whether a length limit removed sampled tokens."""
    reasons = accounting.dropped_by_reason
    return bool(accounting.truncated or any(reasons[reason] for reason in _OF_LIMITS))
