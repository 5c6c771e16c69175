"""Keys that neither verl nor agl_fast reads, and what was likely meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

# How alike two names must be, from 0 to 1; names that share a word may be less alike.
ALIKE = 0.65
ALIKE_WITH_A_WORD = 0.45
MOST_NAMED = 3


def is_allowed(key: str, added: Collection[str]) -> bool:
    """Whether the user has marked the key, a group around it, or a key in it as new."""
    return any(
        key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")
        for other in added
    )


def unknown_keys_error(unknown: Collection[str], defaults: Mapping[str, Any]) -> ValueError:
    """An error that names each key with those that it may have been meant for.

    Args:
        unknown: dotted keys, at least one.
        defaults: verl's and agl_fast's, as a tree.
    """
    known = list(_names(defaults))
    named = "; ".join(f"{key} ({_suggestion(key, known)})" for key in unknown)
    first = next(iter(unknown)).rpartition(".")[2]
    return ValueError(
        f"neither verl nor agl_fast has a key {named}. Write a key that only your own code reads "
        f"with a plus: {'+' + first!r}"
    )


def _suggestion(key: str, known: list[str]) -> str:
    meant = _meant(key, known)
    return f"did you mean {' or '.join(meant)}?" if meant else "nor one with a similar name"


def _meant(key: str, known: list[str]) -> list[str]:
    """Keys of the same last name, nearest first, or the closest name of the section."""
    name = _last(key)
    same = [other for other in known if _last(other) == name]
    if same:
        nearest = max(_shared_groups(key, other) for other in same)
        same = [other for other in same if _shared_groups(key, other) == nearest]
        return sorted(same, key=lambda other: other.count("."))[:MOST_NAMED]
    for candidates in (_siblings(key, known), _section(key, known)):
        close = [other for other in candidates if _is_close(name, _last(other))]
        if close:
            return [max(close, key=lambda other: _closeness(name, _last(other)))]
    return []


def _siblings(key: str, known: list[str]) -> list[str]:
    group = key.rpartition(".")[0]
    return [other for other in known if other.rpartition(".")[0] == group]


def _section(key: str, known: list[str]) -> list[str]:
    section = key.partition(".")[0]
    return [other for other in known if other.partition(".")[0] == section]


def _shared_groups(key: str, other: str) -> int:
    count = 0
    for a, b in zip(key.split(".")[:-1], other.split(".")[:-1], strict=False):
        if a != b:
            break
        count += 1
    return count


def _is_close(name: str, other: str) -> bool:
    shares_words, ratio = _closeness(name, other)
    return ratio >= (ALIKE_WITH_A_WORD if shares_words else ALIKE)


def _closeness(name: str, other: str) -> tuple[bool, float]:
    shares_words = not set(name.split("_")).isdisjoint(other.split("_"))
    return shares_words, difflib.SequenceMatcher(None, name, other).ratio()


def _names(defaults: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in defaults.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _names(value, f"{prefix}{name}.")


def _last(key: str) -> str:
    return key.rpartition(".")[2]
