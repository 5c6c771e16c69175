"""Hydra's `key=value` as a tree of settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """The settings that the arguments spell, as hydra reads them: `a.b=1`, `+a.c=[x,y]`.

    Raises:
        ValueError: an argument is none; the message names it.
    """
    settings: dict[str, Any] = {}
    for argument in arguments:
        try:
            (override,) = OverridesParser.create().parse_overrides([argument])
        except OverrideParseException as error:
            raise ValueError(
                f"{argument!r}: expected key=value, as hydra reads it: {error}"
            ) from None
        if override.is_delete() or override.is_sweep_override():
            raise ValueError(f"{argument!r}: expected key=value with one value")
        *groups, name = override.key_or_group.split(".")
        node = settings
        for group in groups:
            node = node.setdefault(group, {})
            if not isinstance(node, dict):
                raise ValueError(f"{argument!r}: {group} has a value already")
        is_new = override.is_add() or override.is_force_add()
        node[f"+{name}" if is_new else name] = override.value()
    return settings
