"""Finished rollouts into the rows of a training step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import agl_fast
from agl_fast.proxy.sampling import SamplingPolicy
from agl_fast.rollouts.bent_calls import COLUMN as BENT_CALLS
from agl_fast.rollouts.bent_calls import bent_calls
from agl_fast.rollouts.finished import FailedRollouts, Outcome
from agl_fast.rollouts.mismatch_log import MismatchLog
from agl_fast.rows.builder import fitting_limits
from agl_fast.rows.mismatches import causes_of
from agl_fast.rows.options import NO_LIMIT, RowOptions
from agl_fast.rows.token_summary import FITTING, MISMATCH_CAUSES
from agl_fast.training.credit import CreditAssignment, NamedHook

logger = logging.getLogger(__name__)

# Mismatches whose texts are decoded, to name their cause.
_DECODED_A_STEP = 64
_OF_LIMITS = ("overlong_prompt", "overlong_call", "truncated_rollout")
# Until the step's widths are known.
_WIDTHS = {"max_prompt_length": 1, "max_response_length": 1}


class TrainingRows:
    """The rollouts of one training step at a time, planned while others still run.

    Args:
        trace_aggregator: ``agentlightning.trace_aggregator`` of the configuration.
        failed_rollouts: what becomes of rollouts that failed.
        credit: the user's hook, and what calls learn from.
        policy: how training samples; calls that were sampled otherwise are named in the rows'
            column ``bent_calls_list``.
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
        **options: Any,
    ) -> None:
        # A wrong setting is an error now, not after the first rollouts.
        row_options = RowOptions.from_config(
            {"agentlightning": {"trace_aggregator": trace_aggregator}}, **_WIDTHS, **options
        )
        debug = trace_aggregator.get("debug")
        # Only with it can retokenised text be told from rewritten history; it costs time.
        decodes = debug and row_options.rules.merges_calls
        self._options = replace(
            row_options,
            call_index=True,  # losses average over calls
            tokenizer=tokenizer if decodes else None,
        )
        self._tokenizer = tokenizer
        self._mismatch_log: MismatchLog | None = None
        if debug and trace_aggregator.get("mismatch_log_dir"):
            self._mismatch_log = MismatchLog(trace_aggregator["mismatch_log_dir"], tokenizer)
        self._failed_rollouts = failed_rollouts
        self._credit = credit
        self._policy = policy
        self._kept: list[agl_fast.Rollout] = []
        self._ids: set[str] = set()  # where a hook gives them
        self._builder: agl_fast.BatchBuilder | None = None
        self._built_for: Any = None  # limits and device of the builder
        self._said_savings = False
        self.counts: Counter[str] = Counter()

    def add(self, outcome: Outcome) -> None:
        """Take a rollout, or count it as skipped.

        Raises:
            TypeError, ValueError: something in it is wrong; the message names it.
            RuntimeError: the user's hook raised.
        """
        rollout = outcome.training_rollout(self._failed_rollouts)
        if rollout is None:
            reason = "failed" if outcome.failed else "no_trainable_call"
            self._count_skipped(reason, rollouts=1, tokens=outcome.n_tokens)
            return
        kept = self._credit(rollout)
        if self._credit.hook is not None:
            self._refuse_known_ids(kept, self._credit.hook)
            n_tokens = sum(len(call.response_ids) for each in kept for call in each.calls)
            lost = max(0, outcome.n_tokens - n_tokens)
            self._count_skipped("rollout_hook", rollouts=int(not kept), tokens=lost)
        if self._builder is not None:
            self._builder.add_many(kept)
        self._kept += kept

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
        """Forget what was added."""
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
        """The rows of everything that was added.

        Args:
            step: of the trainer, for the mismatch log.

        Raises:
            EmptyBatchError: there are none.
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
        bent = bent_calls(self._kept, batch.columns["rollout_id_list"], self._policy)
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
            if not _took_tokens(batch.accounting):  # else both would lose other tokens
                self._say_savings(batch)
        return batch

    def _log_mismatches(self, log: MismatchLog, batch: agl_fast.Batch, step: int | None) -> None:
        """A disk that is full ends the log, not the run."""
        try:
            log.write(batch.mismatches, self._kept, step)
        except OSError as error:
            logger.warning("Mismatches are only counted from here on: %s", error)
            self._mismatch_log = None

    def _fitting_limits(self, max_prompt_length: int) -> dict[str, float]:
        """As metrics: what would have cut nothing."""
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
        print(
            f"agl_fast: level transition forwards {now} tokens in {len(batch)} rows in this first "
            f"step; level trajectory would have forwarded {then} in {len(merged)} "
            f"({1 - then / now:.0%} less), from the same calls"
        )


def _took_tokens(accounting: agl_fast.Accounting) -> bool:
    """Whether a limit did."""
    reasons = accounting.dropped_by_reason
    return bool(accounting.truncated or any(reasons[reason] for reason in _OF_LIMITS))
