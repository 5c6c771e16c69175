"""Are the user's keys known to verl or agl_fast, and their values of the right type and range?"""

from __future__ import annotations

import difflib
import types
from collections.abc import Collection, Iterator, Mapping
from dataclasses import is_dataclass
from importlib import import_module
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, InstanceOf, TypeAdapter, ValidationError

from agl_fast.verl.config.schema import GROUP, AgentLightningKeys, Range

# verl also reads these types, though its default has another one.
ALSO_ALLOWED: dict[str, type] = {
    "data.train_files": list,
    "data.val_files": list,
    "trainer.logger": str,
}
# Keys that verl reads and does not list in its defaults.
UNLISTED = ("trainer.remove_previous_ckpt_in_save",)
# Groups of free names, though there are defaults: vLLM, PyTorch, Ray and nsys get them unchanged.
FREE = (
    "actor_rollout_ref.rollout.engine_kwargs.vllm",
    "actor_rollout_ref.actor.fsdp_config.wrap_policy",
    "actor_rollout_ref.ref.fsdp_config.wrap_policy",
    "critic.fsdp.wrap_policy",
    "ray_kwargs.ray_init",
    "global_profiler.global_tool_config.nsys.controller_nsight_options",
    "global_profiler.global_tool_config.nsys.worker_nsight_options",
)
# pydantic's errors for a value of the right type; all others are of the type.
VALUE_ERRORS = {
    "finite_number",
    "greater_than",
    "greater_than_equal",
    "less_than",
    "less_than_equal",
    "literal_error",
    "string_pattern_mismatch",
}
# Least similarity of two names, from 0 to 1; lower for names with a word in common.
SIMILARITY = 0.65
SIMILARITY_WITH_A_WORD = 0.45
MAX_SUGGESTIONS = 3


def check_keys(
    settings: Mapping[str, Any], defaults: Mapping[str, Any], added: Collection[str] = ()
) -> None:
    """Check the user's settings against agl_fast's schema, and verl's classes and defaults.

    Args:
        settings: what the user has set, as a tree.
        defaults: verl's and agl_fast's. Neither has interpolations.
        added: dotted keys that the user has marked as new.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a key is unknown, or a value is out of range or no choice. Both name the key,
            its value and what is expected. Unknown keys come first, all of them.
    """
    findings = _Findings(added)
    findings.check_group("", settings, defaults, {}, None)
    if findings.unknown:
        raise _unknown_keys_error(findings.unknown, defaults)
    if findings.errors:
        raise findings.errors[0]


def check_value(key: str, value: Any, hint: Any) -> None:
    """Raise TypeError or ValueError, with key, value and expectation, if a value does not fit.

    Args:
        hint: a type annotation; one of `schema` gives the range. A dataclass stands for a mapping.
    """
    try:
        TypeAdapter(_plain_hint(hint), config=ConfigDict(strict=True)).validate_python(value)
    except ValidationError as error:
        kinds = {found["type"] for found in error.errors()}
        raise _value_error(key, value, hint, kinds) from None


class _Findings:
    """What is wrong with a tree of settings."""

    def __init__(self, added: Collection[str]) -> None:
        self.unknown: list[str] = []
        self.errors: list[TypeError | ValueError] = []
        self._added = added

    def check_group(
        self,
        prefix: str,
        settings: Mapping[str, Any],
        defaults: Mapping[str, Any],
        hints: Mapping[str, Any],
        declared: type | None,
    ) -> None:
        """Check a group of verl's, whose fields `declared` lists if verl builds a class of it."""
        for name, value in settings.items():
            key, hint, default = f"{prefix}{name}", hints.get(name, Any), defaults.get(name)
            if name in hints or name in defaults or name == "_target_" or key in UNLISTED:
                self._check_value(key, value, hint, default)
            else:
                self._check_new(key, value, {*hints, *defaults}, declared)
                continue
            if not isinstance(value, Mapping) or key in FREE:
                continue
            if key == GROUP:
                self._check_own_group(value)
                continue
            below = default if isinstance(default, Mapping) else {}
            child = _class_of({**below, **value}, hint)
            if child is not None or below:
                child_hints = get_type_hints(child) if child else {}
                self.check_group(f"{key}.", value, below, child_hints, child)

    def _check_own_group(self, settings: Mapping[str, Any]) -> None:
        try:
            AgentLightningKeys.model_validate(settings)
        except ValidationError as error:
            for found in error.errors():
                key = ".".join((GROUP, *map(str, found["loc"])))
                if found["type"] != "extra_forbidden":
                    hint = _own_hint(found["loc"])
                    self.errors.append(_value_error(key, found["input"], hint, {found["type"]}))
                elif not _is_added(key, self._added):
                    self.unknown.append(key)

    def _check_value(self, key: str, value: Any, hint: Any, default: Any) -> None:
        if value is None and default is None:
            return
        if hint is Any:
            if default is None:
                return
            hint = type(default)
        if isinstance(value, ALSO_ALLOWED.get(key, ())):
            return
        if isinstance(value, list) and default is None:
            return  # verl annotates some of its lists as optional strings
        try:
            check_value(key, value, hint)
        except (TypeError, ValueError) as error:
            self.errors.append(error)

    def _check_new(self, key: str, value: Any, known: set[str], declared: type | None) -> None:
        if declared is None:
            if not _is_added(key, self._added):
                self.unknown.append(key)
            return
        # verl passes every key of the group to the class, which refuses it, added or not.
        name = key.rpartition(".")[2]
        close = difflib.get_close_matches(name, sorted(known), n=1)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(sorted(known))}"
        self.errors.append(
            ValueError(f"{key}={value!r}: unknown key, verl's {declared.__name__} has none; {hint}")
        )


def _class_of(value: Mapping[str, Any], hint: Any) -> type | None:
    """The class that verl builds from a group."""
    target = value.get("_target_")
    if isinstance(target, str):
        module, _, name = target.rpartition(".")
        found = getattr(import_module(module), name)
        return found if isinstance(found, type) and is_dataclass(found) else None
    for option in get_args(hint) or (hint,):
        if isinstance(option, type) and is_dataclass(option):
            return option
    return None


def _own_hint(loc: tuple[int | str, ...]) -> Any:
    """The annotation of a key of agl_fast, with its range."""
    group: type[BaseModel] = AgentLightningKeys
    for name in loc[:-1]:
        annotation = group.model_fields[str(name)].annotation
        assert isinstance(annotation, type)
        group = annotation
    field = group.model_fields[str(loc[-1])]
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


# --- types and their names


def _plain_hint(hint: Any) -> Any:
    """The annotation of what a configuration holds: groups are mappings, sequences are lists."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return Union[tuple(_plain_hint(option) for option in get_args(hint))]  # noqa: UP007
    if origin in (Annotated, Literal) or hint is Any:
        return hint
    kind = origin or hint
    if kind in (list, tuple):
        return list[_plain_hint((get_args(hint) or (Any,))[0])]  # type: ignore[misc]
    if kind in (dict, Mapping) or is_dataclass(kind):
        return dict[str, Any]
    if kind in (bool, int, float, str, types.NoneType):
        return kind
    if not isinstance(kind, type):
        return Any
    return InstanceOf[kind]  # type: ignore[misc, valid-type]


def _value_error(key: str, value: Any, hint: Any, kinds: Collection[str]) -> TypeError | ValueError:
    """pydantic's error in the words of all messages about keys.

    Args:
        kinds: pydantic's names of what is wrong.
    """
    options = _options(hint)
    if VALUE_ERRORS.isdisjoint(kinds):
        expected = " or ".join(_name(option) for option in options)
        return TypeError(f"{key}={value!r}: expected {expected}, got {_name(type(value))}")
    ranges = [part.words for option in options for part in get_args(option) if _is_range(part)]
    choices = [
        str(choice)
        for option in options
        if get_origin(option) is Literal
        for choice in get_args(option)
    ]
    if choices:
        ranges.append(f"one of {', '.join(choices)}")
    or_null = " or null" if types.NoneType in options else ""
    return ValueError(f"{key}={value!r}: expected {' or '.join(ranges)}{or_null}")


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is_range(part: Any) -> bool:
    return isinstance(part, Range)


def _name(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        return _name(get_args(hint)[0])
    if hint is types.NoneType:
        return "null"
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if is_dataclass(hint) or (isinstance(hint, type) and issubclass(hint, BaseModel)):
        return "a mapping"
    name = getattr(hint, "__name__", str(hint))
    return {"bool": "true or false", "dict": "a mapping", "list": "a list", "tuple": "a list"}.get(
        name, name
    )


# --- unknown keys


def _is_added(key: str, added: Collection[str]) -> bool:
    """Whether the user has marked the key, a group around it, or a key in it as new."""
    return any(
        key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")
        for other in added
    )


def _unknown_keys_error(unknown: Collection[str], defaults: Mapping[str, Any]) -> ValueError:
    """Name each unknown key with those that it was likely meant for."""
    known = list(_dotted_keys(defaults))
    named = "; ".join(f"{key} ({_suggestion(key, known)})" for key in unknown)
    first = next(iter(unknown)).rpartition(".")[2]
    return ValueError(
        f"neither verl nor agl_fast has a key {named}. Write a key that only your own code reads "
        f"with a plus: {'+' + first!r}"
    )


def _suggestion(key: str, known: list[str]) -> str:
    similar = _similar_keys(key, known)
    return f"did you mean {' or '.join(similar)}?" if similar else "nor one with a similar name"


def _similar_keys(key: str, known: list[str]) -> list[str]:
    """Keys of the same last name, nearest first, or the closest name of the section."""
    group, _, name = key.rpartition(".")
    same = [other for other in known if _last(other) == name]
    if same:
        nearest = max(_shared_groups(key, other) for other in same)
        same = [other for other in same if _shared_groups(key, other) == nearest]
        return sorted(same, key=lambda other: other.count("."))[:MAX_SUGGESTIONS]
    siblings = [other for other in known if other.rpartition(".")[0] == group]
    section = key.partition(".")[0]
    for candidates in (siblings, [each for each in known if each.partition(".")[0] == section]):
        close = [other for other in candidates if _is_similar(name, _last(other))]
        if close:
            return [max(close, key=lambda other: _similarity(name, _last(other)))]
    return []


def _shared_groups(key: str, other: str) -> int:
    count = 0
    for a, b in zip(key.split(".")[:-1], other.split(".")[:-1], strict=False):
        if a != b:
            break
        count += 1
    return count


def _is_similar(name: str, other: str) -> bool:
    shares_words, ratio = _similarity(name, other)
    return ratio >= (SIMILARITY_WITH_A_WORD if shares_words else SIMILARITY)


def _similarity(name: str, other: str) -> tuple[bool, float]:
    shares_words = not set(name.split("_")).isdisjoint(other.split("_"))
    return shares_words, difflib.SequenceMatcher(None, name, other).ratio()


def _dotted_keys(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _dotted_keys(value, f"{prefix}{name}.")


def _last(key: str) -> str:
    return key.rpartition(".")[2]
