"""Recommend a level and limits."""

from __future__ import annotations

from collections.abc import Iterator

from agl_fast.rows.levels import Level, LevelName
from agl_fast.rows.mismatches import causes_in_words
from agl_fast.rows.options import TREE_MAX_TOKENS
from agl_fast.tools.analyze.analysis import Analysis

# A level that saves less is not worth a change.
WORTH = 1.2

# Explanations without a tokenizer, from ids alone.
_KINDS = {
    "history_rewritten": (
        "an earlier answer or a later message changed: the chat template renders it differently, "
        "or the agent edits it. --tokenizer finds the cause"
    ),
    "generation_prompt": (
        "the history lacks what the chat template puts before an answer, such as an empty think "
        "block. A template that writes it in both places, or in neither, merges at level trajectory"
    ),
    "retokenised": "the history was tokenised again, to other ids for the same text",
    "shortened": "the agent removes the last turns of its history, or repeats a prompt",
}


def best_level(analysis: Analysis) -> LevelName:
    """The recommended level: the simplest unless another one is ``WORTH`` times cheaper.

    Level tree only if it supports the model.
    """
    gains = [_gain(analysis, than, "tree") for than in ("transition", "trajectory")]
    if min(gains) >= WORTH and not analysis.tree_refusals:
        return "tree"
    if _gain(analysis, "transition", "trajectory") >= WORTH:
        return "trajectory"
    return "transition"


def advice(analysis: Analysis) -> str:
    """The recommendation as a paragraph."""
    best = best_level(analysis)
    return " ".join(
        [*_of_level(analysis, best), *_of_limits(analysis, best), *_of_breaks(analysis)]
    )


def _gain(analysis: Analysis, than: LevelName, level: LevelName) -> float:
    """Cost of level ``than`` divided by that of ``level``, without limits."""
    if analysis.model is not None:
        costs = analysis.model.costs_without_limits
        return costs[than].flops / costs[level].flops
    layouts = analysis.layouts_without_limits
    return layouts[than].tokens / layouts[level].tokens


def _of_level(analysis: Analysis, best: LevelName) -> Iterator[str]:
    unit = "tokens" if analysis.model is None else "operations"
    merged, trees = (_gain(analysis, "transition", each) for each in ("trajectory", "tree"))
    over_merged = _gain(analysis, "trajectory", "tree")
    if Level.of(best).is_tree:
        yield (
            f"Train at level tree: {trees:.2f}× fewer {unit} than one row a call, "
            f"{over_merged:.2f}× fewer than level trajectory, and every sampled token keeps its "
            "exact context."
        )
        return
    if Level.of(best).merges_calls:
        yield f"Train at level trajectory: {merged:.2f}× fewer {unit} than one row a call."
    else:
        yield (
            f"Level transition is sufficient: level trajectory needs only {merged:.2f}× fewer "
            f"{unit}."
        )
    if analysis.tree_refusals:
        yield (
            f"Level tree does not support this model: it has {', '.join(analysis.tree_refusals)}."
        )
        return
    compared = over_merged if Level.of(best).merges_calls else trees
    yield f"Level tree saves too little here: {compared:.2f}× fewer {unit} than that."


def _of_limits(analysis: Analysis, best: LevelName) -> Iterator[str]:
    layout = analysis.layouts[best]
    if layout.lost:
        yield (
            f"Limits cut {layout.lost / analysis.sampled:.1%} of the sampled tokens there; "
            f"nothing is lost with {_fitting(analysis, best)}."
        )
    else:
        yield f"Nothing is lost to limits with {_fitting(analysis, best)}."
    longest_tree = analysis.layouts_without_limits["tree"].longest_row
    if Level.of(best).is_tree and longest_tree > TREE_MAX_TOKENS:
        yield (
            f"The longest rollout is a tree of {longest_tree:,} tokens, which the default "
            f"tree_max_tokens={TREE_MAX_TOKENS} splits, exactly."
        )


def _fitting(analysis: Analysis, level: LevelName) -> str:
    """The smallest limits that cut nothing."""
    if Level.of(level).is_tree:
        return f"tree_max_tokens={analysis.longest_call} or more"
    layout = analysis.layouts_without_limits[level]
    fitting = [
        f"max_prompt_length={layout.longest_prompt}",
        f"max_response_length={layout.longest_response}",
    ]
    if analysis.limits[level].max_total_length is not None:
        fitting.append(f"max_total_length={layout.longest_row}")
    return f"{', '.join(fitting[:-1])} and {fitting[-1]}"


def _of_breaks(analysis: Analysis) -> Iterator[str]:
    calls = _broken_calls(analysis)
    if not calls:
        yield "No call breaks the prefix of an earlier one."
        return
    yield (
        f"Of {analysis.calls:,} calls, {sum(calls.values()):,} break the prefix of an earlier one."
    )
    if analysis.causes:
        yield causes_in_words(analysis.causes)
        return
    worst = max(calls, key=calls.__getitem__)
    yield f"In most cases ({calls[worst]:,}), {_KINDS[worst]}."


def _broken_calls(analysis: Analysis) -> dict[str, int]:
    """Broken prefixes that can be avoided, by kind; new conversations cannot."""
    return {each.kind: each.calls for each in analysis.breaks if each.kind in _KINDS}
