"""The user's settings: plain values, by dotted key, under the names of today."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

NEW_KEY_MARK = "+"
RENAMED_KEYS = Path(__file__).with_name("renamed_keys.yaml")


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


def plain_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Settings as dictionaries, lists and plain values, and the keys that are marked as new.

    Args:
        settings: a tree of mappings or OmegaConf. As in hydra, `+` before a name marks a key that
            verl and agl_fast need not know.

    Returns:
        The tree without the marks; dotted keys that carried one.

    Raises:
        TypeError: a configuration cannot hold the value.
        ValueError: a name is no text, or has a dot; a value is NaN, or missing (`???`). Both name
            the key and its value.
    """
    added: set[str] = set()
    return _plain_group(settings, "", added), added


def _plain_group(group: Mapping[str, Any], prefix: str, added: set[str]) -> dict[str, Any]:
    if OmegaConf.is_config(group):
        group = _container(group, prefix)
    plain: dict[str, Any] = {}
    for given, value in group.items():
        if not isinstance(given, str) or "." in given:
            raise ValueError(
                f"{prefix}{given!r}: expected a name without dots; nest what is in a group"
            )
        name = given.lstrip(NEW_KEY_MARK)
        key = f"{prefix}{name}"
        if name in plain:
            raise ValueError(f"{key} is set twice: expected it once, with or without +")
        if name != given:
            added.add(key)
        plain[name] = _plain_value(value, key, added)
    return plain


def _plain_value(value: Any, key: str, added: set[str]) -> Any:
    if OmegaConf.is_config(value):
        value = _container(value, key)
    if isinstance(value, Mapping):
        return _plain_group(value, f"{key}.", added)
    if isinstance(value, (list, tuple)):
        return [_plain_value(item, f"{key}[{i}]", added) for i, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(f"{key}={value!r}: expected a finite number")
    if isinstance(value, str) and "${" in value:
        _require_interpolation(value, key)
    if value == "???":
        raise ValueError(f"{key}={value!r}: expected a value, this stands for a missing one")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if callable(value):
        raise TypeError(
            f"{key}={value!r}: expected its name, 'module:function', as the processes of a run "
            "import it"
        )
    raise TypeError(
        f"{key}={value!r}: expected a number, a text, true or false, null, a list or a mapping, "
        f"got {type(value).__name__}"
    )


def _require_interpolation(text: str, key: str) -> None:
    try:
        OmegaConf.create([text])
    except OmegaConfBaseException as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"{key}={text!r}: expected an interpolation: {why}") from error


def _container(value: Any, key: str) -> Any:
    try:
        return OmegaConf.to_container(value, resolve=False)
    except OmegaConfBaseException as error:
        raise ValueError(f"{key}: {error}") from error


# --- keys of verl 0.6.1 and Agent-lightning 0.3


@dataclass(frozen=True)
class RenamedKey:
    """One entry of renamed_keys.yaml, whose comments explain the fields."""

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
    table: Any = OmegaConf.to_container(OmegaConf.load(RENAMED_KEYS))
    entries = [
        RenamedKey(**entry | {"ignored": "any" if ignored == "any" else tuple(ignored)})
        for entry in table
        for ignored in [entry.get("ignored", ())]
    ]
    return tuple(sorted(entries, key=lambda entry: -len(entry.old)))


def rename(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Move old keys to where verl 0.9.1 reads them.

    Args:
        settings: by dotted key.

    Returns:
        The settings with new keys, and one line for each key that was moved or ignored.

    Raises:
        ValueError: nothing replaces a key, or both keys are set differently.
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
