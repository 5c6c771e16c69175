"""The user's settings as a plain tree."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

ADDED = "+"


def plain_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Settings as dictionaries, lists and plain values, and the keys that are marked as new.

    Args:
        settings: a tree of mappings or OmegaConf. A name that begins with `+`, as in hydra, is of a
            key that verl and agl_fast need not know.

    Returns:
        The tree without the marks; dotted keys that carried one.

    Raises:
        TypeError: a value is nothing that a configuration can hold.
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
        name = given.lstrip(ADDED)
        key = f"{prefix}{name}"
        if name in plain:
            raise ValueError(f"{key} is set twice: expected it once, with or without {ADDED}")
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
    # A callable: compose says more about it.
    if value is None or isinstance(value, (bool, int, float, str)) or callable(value):
        return value
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
