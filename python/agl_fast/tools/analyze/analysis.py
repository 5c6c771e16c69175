"""Analyze traces: counts, costs, and causes of broken prefixes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agl_fast.rows.accounting import MISMATCH_KINDS, Mismatch, RolloutEntry
from agl_fast.rows.calls import Rollout
from agl_fast.rows.levels import LEVELS, Level, LevelName
from agl_fast.rows.mismatches import causes_of
from agl_fast.rows.options import Limits
from agl_fast.tools.analyze.costs import Costs, Hardware, costs_of, state_bytes
from agl_fast.tools.analyze.layouts import LaidOut, Layout, lay_out
from agl_fast.tools.analyze.model_shape import ModelShape
from agl_fast.tools.analyze.traces import Traces

# Number of broken prefixes whose text is decoded for their cause.
_DECODED = 1000


@dataclass(frozen=True, slots=True)
class Break:
    """Broken prefixes of one kind (docs/rows.md, "Mismatches").

    Attributes:
        kind: one of ``MISMATCH_KINDS``.
        calls: number of calls.
        tokens: shared with the closest chain and repeated in a row of their own.
    """

    kind: str
    calls: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Rewards:
    """Rewards of the rollouts.

    Attributes:
        mean, lowest, highest: over all rollouts.
        missing: number of rollouts without a reward.
        groups, flat_groups: number of groups of several rollouts, and of those with equal rewards.
    """

    mean: float
    lowest: float
    highest: float
    missing: int
    groups: int
    flat_groups: int


@dataclass(frozen=True, slots=True)
class ModelAnalysis:
    """Cost estimates for a model.

    Attributes:
        shape, hardware: that the estimates are for.
        costs: per level.
        costs_without_limits: per level, if nothing is cut.
        state_bytes: of weights, gradients and Adam's moments, the same at every level.
    """

    shape: ModelShape
    hardware: Hardware
    costs: Mapping[LevelName, Costs]
    costs_without_limits: Mapping[LevelName, Costs]
    state_bytes: int


@dataclass(frozen=True, slots=True)
class Analysis:
    """What traces contain, and what each level makes of them.

    Attributes:
        source, limits, notes: of the traces.
        rollouts, calls: numbers of them.
        statuses: number of rollouts by final status, where recorded.
        sampled: response tokens of all calls.
        longest_call: tokens of its prompt and response.
        rewards: of the rollouts.
        layouts: rows per level.
        layouts_without_limits: rows per level, if nothing is cut.
        breaks: broken prefixes by kind, those that occur.
        knows_text: whether a tokenizer distinguished retokenised text from rewritten history.
        causes: broken prefixes by cause (`agl_fast.rows.mismatches.CAUSES`); empty without a
            tokenizer.
        model: cost estimates; None without a model.
        tree_refusals: why level tree does not support the model, the given or the recorded one.
    """

    source: str
    limits: Mapping[LevelName, Limits]
    notes: Sequence[str]
    rollouts: int
    calls: int
    statuses: Mapping[str, int]
    sampled: int
    longest_call: int
    rewards: Rewards
    layouts: Mapping[LevelName, Layout]
    layouts_without_limits: Mapping[LevelName, Layout]
    breaks: Sequence[Break]
    knows_text: bool
    causes: Mapping[str, int]
    model: ModelAnalysis | None
    tree_refusals: Sequence[str] = ()


def analyze(
    traces: Traces,
    *,
    model: ModelShape | None = None,
    hardware: Hardware | None = None,
    tokenizer: Any = None,
) -> Analysis:
    """Analyze traces at every level.

    Args:
        traces: rollouts and limits.
        model: estimate costs for this model.
        hardware: that the model trains on.
        tokenizer: object with ``decode``; finds the causes of broken prefixes.

    Raises:
        TypeError, ValueError: a limit, or a field of a rollout, is wrong; the message names it.
        ValueError: no call can be trained.
    """
    rollouts = traces.rollouts
    free = {level: _laid_out(rollouts, level, Limits(), tokenizer) for level in LEVELS}
    if not free["transition"].layout.rows:
        raise ValueError(
            f"{traces.source}: none of its calls has a prompt, a response, and may be trained: "
            "there is nothing to analyze"
        )
    limited = {
        level: free[level].layout if limits == Limits() else lay_out(rollouts, level, limits).layout
        for level, limits in traces.limits.items()
    }
    without_limits = {level: each.layout for level, each in free.items()}
    calls = [call for rollout in rollouts for call in rollout.calls]
    return Analysis(
        source=traces.source,
        limits=traces.limits,
        notes=traces.notes,
        rollouts=len(rollouts),
        calls=len(calls),
        statuses=dict(Counter(each.status for each in rollouts if each.status is not None)),
        sampled=limited["transition"].accounting.sampled,
        longest_call=max(len(call.prompt_ids) + len(call.response_ids) for call in calls),
        rewards=_rewards(free["transition"].rollouts),
        layouts=limited,
        layouts_without_limits=without_limits,
        breaks=breaks_of(free["trajectory"].mismatches),
        causes={}
        if tokenizer is None
        else causes_of(free["trajectory"].mismatches, rollouts, tokenizer, _DECODED),
        knows_text=tokenizer is not None,
        model=None if model is None else _model_analysis(model, hardware, limited, without_limits),
        tree_refusals=traces.tree_refusals if model is None else model.tree_refusals,
    )


def _laid_out(
    rollouts: Sequence[Rollout], level: LevelName, limits: Limits, tokenizer: Any
) -> LaidOut:
    return lay_out(rollouts, level, limits, tokenizer if Level.of(level).merges_calls else None)


def _model_analysis(
    model: ModelShape,
    hardware: Hardware | None,
    layouts: Mapping[LevelName, Layout],
    without_limits: Mapping[LevelName, Layout],
) -> ModelAnalysis:
    hardware = hardware or Hardware()
    costs, of_all = (
        {level: costs_of(layout, model, hardware) for level, layout in each.items()}
        for each in (layouts, without_limits)
    )
    return ModelAnalysis(model, hardware, costs, of_all, state_bytes(model))


def _rewards(rollouts: Sequence[RolloutEntry]) -> Rewards:
    groups: dict[str, list[float]] = {}
    for each in rollouts:
        groups.setdefault(each.data_id, []).append(each.reward)
    several = [rewards for rewards in groups.values() if len(rewards) > 1]
    rewards = [each.reward for each in rollouts]
    return Rewards(
        mean=sum(rewards) / len(rewards),
        lowest=min(rewards),
        highest=max(rewards),
        missing=sum(not each.has_reward for each in rollouts),
        groups=len(several),
        flat_groups=sum(len(set(rewards)) == 1 for rewards in several),
    )


def breaks_of(mismatches: Sequence[Mismatch]) -> list[Break]:
    """Count broken prefixes by kind, those that occur."""
    of_kind: dict[str, list[Mismatch]] = defaultdict(list)
    for mismatch in mismatches:
        of_kind[mismatch.kind].append(mismatch)
    return [
        Break(kind, len(of_kind[kind]), sum(mismatch.index for mismatch in of_kind[kind]))
        for kind in MISMATCH_KINDS
        if of_kind[kind]
    ]
