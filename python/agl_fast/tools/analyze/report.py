"""Format an analysis as text or JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from agl_fast.printable import table
from agl_fast.rows.accounting import DROP_REASONS
from agl_fast.rows.levels import LEVELS
from agl_fast.rows.mismatches import AGENT_LIGHTNING_NAMES
from agl_fast.tools.analyze.advice import advice, best_level
from agl_fast.tools.analyze.analysis import Analysis, ModelAnalysis

_LIMITS = ("max_prompt_length", "max_response_length", "max_total_length", "tree_max_tokens")
_GIB = 2**30


def as_json(analysis: Analysis) -> dict[str, Any]:
    """The analysis in plain types, named as the attributes."""
    found = asdict(analysis)
    for level in LEVELS:
        found["layouts"][level]["lost"] = analysis.layouts[level].lost
    found["best_level"] = best_level(analysis)
    found["advice"] = advice(analysis)
    return found


def as_text(analysis: Analysis) -> str:
    """Tables and the recommendation."""
    parts = [
        "\n".join(_of_traces(analysis)),
        table([["", *LEVELS], *_of_layouts(analysis)]),
    ]
    if analysis.breaks:
        parts.append(
            table(
                [
                    ["calls that extend no earlier one", "calls", "tokens repeated"],
                    *_of_breaks(analysis),
                ]
            )
        )
    if analysis.model is not None:
        parts.append(_of_model(analysis, analysis.model))
    parts.append(advice(analysis))
    return "\n\n".join(parts)


def _of_traces(analysis: Analysis) -> Iterator[str]:
    yield (
        f"{analysis.source}: {analysis.rollouts:,} rollouts, {analysis.calls:,} calls, "
        f"{analysis.sampled:,} sampled tokens; the longest call has {analysis.longest_call:,} "
        "tokens"
    )
    rewards = analysis.rewards
    yield (
        f"rewards: {rewards.mean:.3g} on average, {rewards.lowest:.3g} to {rewards.highest:.3g}"
        + (f"; {rewards.missing:,} rollouts have none" if rewards.missing else "")
        + (
            f"; {rewards.flat_groups:,} of {rewards.groups:,} groups have equal rewards"
            if rewards.groups
            else ""
        )
    )
    if analysis.statuses:
        told = ", ".join(f"{n:,} {status}" for status, n in sorted(analysis.statuses.items()))
        yield f"final status: {told}; all are counted"
    yield from analysis.notes


def _of_layouts(analysis: Analysis) -> Iterator[list[str]]:
    layouts = [analysis.layouts[level] for level in LEVELS]
    accountings = [layout.accounting for layout in layouts]
    for name in _LIMITS:
        limits = [getattr(analysis.limits[level], name) for level in LEVELS]
        if any(limits):
            yield _line(name, limits)
    yield _line("rows", [layout.rows for layout in layouts])
    if any(layout.marked_rows for layout in layouts):
        yield _line("rows left out", [layout.marked_rows for layout in layouts])
    tokens = [layout.tokens for layout in layouts]
    yield _line("tokens forwarded", tokens)
    yield from _of_each_trained(analysis, "  a trained token", "  times fewer", tokens)
    uncut = [analysis.layouts_without_limits[level] for level in LEVELS]
    if any(one.tokens != other.tokens for one, other in zip(layouts, uncut, strict=True)):
        yield _line("rows, nothing cut by limits", [layout.rows for layout in uncut])
        yield _line("  tokens forwarded", [layout.tokens for layout in uncut])
    yield _line("tokens padded to P + R", [layout.padded_tokens for layout in layouts])
    yield _line("longest row", [layout.longest_row for layout in layouts])
    yield _line("sampled tokens trained", [each.trained for each in accountings])
    yield _line("  truncated", [each.truncated for each in accountings])
    for reason in DROP_REASONS:
        dropped = [each.dropped_by_reason[reason] for each in accountings]
        if any(dropped):
            yield _line(f"  dropped: {reason.replace('_', ' ')}", dropped)
    if any(each.duplicate for each in accountings):
        yield _line("  recorded twice", [each.duplicate for each in accountings])


def _of_each_trained(
    analysis: Analysis, per_trained: str, ratio: str, costs: Sequence[float]
) -> Iterator[list[str]]:
    """Cost per trained token, and ratios of costs if all levels train the same tokens."""
    trained = [analysis.layouts[level].accounting.trained for level in LEVELS]
    shares = [cost / n if n else None for cost, n in zip(costs, trained, strict=True)]
    yield [per_trained, *("-" if each is None else f"{each:.3g}" for each in shares)]
    if len(set(trained)) == 1 and trained[0]:
        yield [ratio, *(f"{costs[0] / cost:.2f}" for cost in costs)]


def _of_breaks(analysis: Analysis) -> Iterator[list[str]]:
    for each in analysis.breaks:
        name = f"  {each.kind.replace('_', ' ')} ({AGENT_LIGHTNING_NAMES[each.kind]})"
        yield [name, f"{each.calls:,}", f"{each.tokens:,}"]


def _of_model(analysis: Analysis, model: ModelAnalysis) -> str:
    costs = [model.costs[level] for level in LEVELS]
    rows = []
    for name, key in (("", ""), (", checkpointed", "_recomputed")):
        flops = [getattr(each, f"flops{key}") / 1e12 for each in costs]
        rows.append([f"forward + backward{name}, TFLOP", *(f"{n:,.4g}" for n in flops)])
        rows += _of_each_trained(analysis, "  a trained token", "  times fewer", flops)
        if model.hardware.tflops is not None:
            seconds = [getattr(each, f"seconds{key}") for each in costs]
            speed = f"  seconds at {model.hardware.tflops:g} TFLOP/s"
            rows.append([speed, *(f"{n:.3g}" for n in seconds)])
    rows.append(_line("largest micro-batch, tokens", [each.micro_batch for each in costs]))
    for name, key in (("", ""), (", checkpointed", "_recomputed")):
        sizes = [getattr(each, f"activation_bytes{key}") / _GIB for each in costs]
        rows.append([f"  its activations{name}, GiB", *(f"{n:.3g}" for n in sizes)])
    shape = model.shape
    head = (
        f"estimated for {shape.parameters / 1e9:.3g} billion parameters in {shape.layers} layers; "
        f"weights, gradients and Adam take {model.state_bytes / _GIB:.3g} GiB, divided by the GPUs"
    )
    return f"{head}\n{table([['', *LEVELS], *rows])}"


def _line(name: str, values: Sequence[int | None]) -> list[str]:
    return [name, *map(_counted, values)]


def _counted(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
