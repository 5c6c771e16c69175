"""Keys of verl 0.6.1 and Agent-lightning 0.3 that verl 0.9.1 does not read: moved or refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

TABLE = Path(__file__).with_name("renamed_keys.yaml")


@dataclass(frozen=True)
class RenamedKey:
    """One entry of the table, whose comments say what the fields mean."""

    old: str
    new: str | None = None
    why: str | None = None
    ignored: tuple[Any, ...] | Literal["any"] = ()

    def fits(self, key: str) -> bool:
        return key == self.old or key.startswith(f"{self.old}.")

    def ignores(self, value: object) -> bool:
        if self.ignored == "any" or value is None or value == {}:
            return True
        # 0 == False in Python, in a configuration they are not the same.
        return any(value == other and type(value) is type(other) for other in self.ignored)


@cache
def renamed_keys() -> tuple[RenamedKey, ...]:
    """The table, longest keys first."""
    table: Any = OmegaConf.to_container(OmegaConf.load(TABLE))
    entries = [
        RenamedKey(**entry | {"ignored": "any" if ignored == "any" else tuple(ignored)})
        for entry in table
        for ignored in [entry.get("ignored", ())]
    ]
    return tuple(sorted(entries, key=lambda entry: -len(entry.old)))


def leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values. An empty mapping is a value."""
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{key}.")
        else:
            yield key, value


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `leaves`."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *groups, name = key.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = value
    return tree


def rename(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Move old keys to where verl 0.9.1 reads them.

    Args:
        settings: by dotted key.

    Returns:
        The settings with new keys, and one line for each key that was moved or ignored.

    Raises:
        ValueError: a key has nothing that takes its place, or both keys are set differently.
    """
    renamed: dict[str, Any] = {}
    lines = []
    moved: dict[str, str] = {}
    for key, value in settings.items():
        entry = next((entry for entry in renamed_keys() if entry.fits(key)), None)
        if entry is None:
            renamed[key] = value
        elif entry.new is not None:
            moved[key] = entry.new + key.removeprefix(entry.old)
        elif entry.ignores(value):
            lines.append(f"{key}={value!r} is ignored: {entry.why}")
        else:
            raise ValueError(f"{key}={value!r}: expected not to be set: {entry.why}")
    for key, new in moved.items():
        value = settings[key]
        if new in settings and settings[new] != value:
            raise ValueError(
                f"{key}={value!r}: expected {settings[new]!r} or not to be set, as it is called "
                f"{new} now, and that is set to {settings[new]!r}"
            )
        renamed[new] = value
        lines.append(f"{key} is called {new} now")
    return renamed, lines
