"""Effect of each of verl's keys: honoured, mapped, refused or unused (`verl_keys.yaml`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

TABLE = Path(__file__).with_name("verl_keys.yaml")
Fate = Literal["honoured", "mapped", "refused", "unused"]
Part = Literal["critic", "reference"]
_NO_PART = {
    "critic": "the run has no critic",
    "reference": "no KL term uses the reference policy",
}


@dataclass(frozen=True)
class VerlKeys:
    """One entry of verl_keys.yaml, whose comments explain the fields."""

    fate: Fate
    keys: tuple[str, ...]
    why: str | None = None
    accept: tuple[Any, ...] = ()
    to: str | None = None
    part: Part | None = None

    def closeness(self, key: str) -> int:
        """Number of characters other than `*` of the best matching pattern; -1: none matches."""
        fitting = (pattern for pattern in self.keys if fnmatchcase(key, pattern))
        return max((len(pattern.replace("*", "")) for pattern in fitting), default=-1)


@cache
def verl_keys() -> tuple[VerlKeys, ...]:
    table: Any = OmegaConf.to_container(OmegaConf.load(TABLE))
    return tuple(
        VerlKeys(
            fate=entry["is"],
            keys=tuple(entry["keys"]),
            why=entry.get("why"),
            accept=tuple(entry.get("accept", ())),
            to=entry.get("to"),
            part=entry.get("part"),
        )
        for entry in table
    )


@cache
def fate_of(key: str) -> VerlKeys | None:
    """The entry of the best matching pattern; None: no pattern matches."""
    best = max(verl_keys(), key=lambda entry: entry.closeness(key))
    return best if best.closeness(key) >= 0 else None


def move_values(flat: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Copy values to the keys that verl reads instead.

    Args:
        flat: the user's settings by dotted key.

    Returns:
        The settings, and a line for each that was copied.
    """
    moved = dict(flat)
    lines = []
    for key, value in flat.items():
        entry = fate_of(key)
        if entry is not None and entry.to is not None and entry.to not in flat:
            moved[entry.to] = value
            lines.append(f"{entry.to}={value!r}, as {key} says, which verl 0.9.1 does not read")
    return moved, lines


def check_effects(
    given: Mapping[str, Any], defaults: Mapping[str, Any], parts: Collection[str]
) -> list[str]:
    """Check for settings that verl refuses or does not read.

    Args:
        given: the user's settings by dotted key, interpolations resolved.
        defaults: verl's and agl_fast's, likewise.
        parts: which of `critic` and `reference` the run has.

    Returns:
        For each reason one line with the keys that have no effect.

    Raises:
        ValueError: a refused key is set; the message gives key, value and reason.
    """
    unused: dict[str, list[str]] = {}
    for key, value in given.items():
        entry = fate_of(key)
        default = defaults.get(key)
        if entry is None or value is None or value == default:
            continue
        if entry.fate == "refused" and value not in entry.accept:
            allowed = " or ".join(map(repr, entry.accept or (default,)))
            raise ValueError(f"{key}={value!r}: expected {allowed}, as {entry.why}")
        why = entry.why if entry.fate == "unused" else None
        if entry.part is not None and entry.part not in parts:
            why = _NO_PART[entry.part]
        if why is not None:
            unused.setdefault(why, []).append(f"{key}={value!r}")
    return [f"without effect: {', '.join(keys)} ({why})" for why, keys in unused.items()]
