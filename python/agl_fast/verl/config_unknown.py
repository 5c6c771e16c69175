"""Keys in the section `agentlightning` that agl_fast does not have."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

SECTION = "agentlightning"


def unknown_own_keys(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """One line for each key that agl_fast does not read. A subclass of the user may.

    Args:
        settings: what the user has set, as a tree.
        defaults: verl's and agl_fast's, as a tree.
    """
    own = settings.get(SECTION)
    if not isinstance(own, Mapping):
        return []
    known = list(_names(defaults[SECTION], f"{SECTION}."))
    return [
        f"{key} is not a key of agl_fast, which does not read it; did you mean "
        f"{' or '.join(_meant(key, known))}?"
        for key in _unknown(own, defaults[SECTION], f"{SECTION}.")
    ]


def _unknown(
    settings: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str
) -> Iterator[str]:
    for name, value in settings.items():
        if name not in defaults:
            yield f"{prefix}{name}"
        elif isinstance(value, Mapping) and isinstance(defaults[name], Mapping):
            yield from _unknown(value, defaults[name], f"{prefix}{name}.")


def _names(defaults: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in defaults.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _names(value, f"{prefix}{name}.")


def _meant(key: str, known: list[str]) -> list[str]:
    """Those of the same last name, or the closest one."""
    name = _last(key)
    return [other for other in known if _last(other) == name] or [
        max(known, key=lambda other: _closeness(name, _last(other)))
    ]


def _closeness(name: str, other: str) -> tuple[bool, float]:
    shares_words = not set(name.split("_")).isdisjoint(other.split("_"))
    return shares_words, difflib.SequenceMatcher(None, name, other).ratio()


def _last(key: str) -> str:
    return key.rpartition(".")[2]
