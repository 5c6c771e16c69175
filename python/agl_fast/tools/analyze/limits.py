"""What rows may hold at a level, as a user or a recording's header says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from agl_fast.rows.row_options import Level, OverlongPrompt, TruncatedRollouts

LEVELS: tuple[Level, ...] = get_args(Level)
NO_LIMIT = 2**30
_OF_ROWS = ("max_prompt_length", "max_response_length", "max_total_length")
_OF_TREES = ("tree_max_tokens",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one level, named as the arguments of ``build_batch``; a limit of None is none."""

    max_prompt_length: int | None = None
    max_response_length: int | None = None
    max_total_length: int | None = None
    tree_max_tokens: int | None = None
    overlong_prompt: OverlongPrompt | None = None
    truncated_rollouts: TruncatedRollouts = "train"

    def options(self) -> dict[str, Any]:
        """For ``build_batch``."""
        return {
            "max_prompt_length": _or_none(self.max_prompt_length),
            "max_response_length": _or_none(self.max_response_length),
            "max_total_length": self.max_total_length,
            "tree_max_tokens": _or_none(self.tree_max_tokens),
            "overlong_prompt": self.overlong_prompt,
            "truncated_rollouts": self.truncated_rollouts,
        }


def limits_of(
    level: Level, about: Mapping[str, Any] | None, given: Mapping[str, int | None] | None
) -> Limits:
    """What counts at a level.

    Args:
        about: a recording's header (docs/recording.md). The options of rows are those of the run's
            own level; another level's limits are known where the run's settings name them.
        given: instead, by name, of any level; None: not given.

    Raises:
        TypeError: a group of the header is no object.
    """
    names = _OF_TREES if level == "tree" else _OF_ROWS
    known = {name: value for name, value in (given or {}).items() if name in names}
    fields = {**_recorded(about or {}, level), **_without_none(known)}
    return Limits(**fields)


def _recorded(about: Mapping[str, Any], level: Level) -> dict[str, Any]:
    rows = _group(about, "rows")
    if level == "tree":
        return _without_none({name: rows.get(name) for name in _OF_TREES})
    found = {name: rows.get(name) for name in ("overlong_prompt", "truncated_rollouts")}
    if rows.get("level") == level:
        found |= {name: rows.get(name) for name in _OF_ROWS}
    else:
        settings = _group(about, "settings")
        if level == "transition":
            group, prefix = _group(settings, "data"), ""
        else:
            group, prefix = _group(settings, "agentlightning", "trace_aggregator"), "trajectory_"
        found |= {name: group.get(f"{prefix}{name}") for name in _OF_ROWS}
    return _without_none(found)


def _group(parent: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    for name in names:
        group = parent.get(name)
        if not isinstance(group, Mapping | None):
            raise TypeError(f"{name}: expected an object in the recording's header, got {group!r}")
        parent = group or {}
    return parent


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _or_none(limit: int | None) -> int:
    return NO_LIMIT if limit is None else limit
