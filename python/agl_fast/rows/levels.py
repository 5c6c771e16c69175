"""The levels of rows and their properties. No other module compares a level's name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

LevelName = Literal["transition", "trajectory", "tree"]
LEVELS: tuple[LevelName, ...] = get_args(LevelName)

_AGGREGATOR = "agentlightning.trace_aggregator"
_WIDTHS = ("max_prompt_length", "max_response_length")
_CALL_WIDTHS = {name: f"data.{name}" for name in _WIDTHS}  # verl's keys, limits of a call
_ROW_LIMITS = (*_WIDTHS, "max_total_length")


@dataclass(frozen=True, slots=True)
class Level:
    """How calls become rows at a level.

    Attributes:
        name: as users write it.
        row_is_call: each call is a row.
        merges_calls: a call whose prompt extends a chain's context joins that chain's row.
        is_tree: a row is the prefix tree of a rollout's calls.
        limits: row options that limit the length of a row.
        keys: configuration key of each width and limit that the level has.
    """

    name: LevelName
    row_is_call: bool
    merges_calls: bool
    is_tree: bool
    limits: tuple[str, ...]
    keys: Mapping[str, str]

    def row_length_options(self, *, has_total_limit: bool) -> tuple[str, ...]:
        """Names of the row options whose sum is the length of the longest row."""
        if self.is_tree:
            return ("tree_max_tokens",)
        return ("max_total_length",) if has_total_limit else _WIDTHS

    @staticmethod
    def of(name: str) -> Level:
        """Look a level up by name.

        Raises:
            ValueError: unknown level; the message lists the names.
        """
        if not isinstance(name, str) or name not in _BY_NAME:
            raise ValueError(f"level must be one of {', '.join(LEVELS)}; got {name!r}")
        return _BY_NAME[name]


_BY_NAME: dict[str, Level] = {
    level.name: level
    for level in (
        Level("transition", True, False, False, _ROW_LIMITS, _CALL_WIDTHS),
        Level(
            "trajectory",
            False,
            True,
            False,
            _ROW_LIMITS,
            {name: f"{_AGGREGATOR}.trajectory_{name}" for name in _ROW_LIMITS},
        ),
        Level("tree", False, False, True, ("tree_max_tokens",), _CALL_WIDTHS),
    )
}
