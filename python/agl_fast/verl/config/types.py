"""Are the user's settings of the types that verl and agl_fast expect?"""

from __future__ import annotations

import difflib
import types
from collections.abc import Collection, Mapping
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from agl_fast.verl.config.own_keys import AgentLightningKeys
from agl_fast.verl.config.unknown_keys import is_allowed, unknown_keys_error

# verl reads these as well, though its default is of another type.
ALSO_ALLOWED: dict[str, type] = {
    "data.train_files": list,
    "data.val_files": list,
    "trainer.logger": str,
}
OWN = AgentLightningKeys.__module__
# Keys that verl reads and does not list in its defaults.
UNLISTED = ("trainer.remove_previous_ckpt_in_save",)
# Groups in which every name is the user's, though there are defaults: they go to vLLM, PyTorch, Ray
# and nsys as they are.
FREE = (
    "actor_rollout_ref.rollout.engine_kwargs.vllm",
    "actor_rollout_ref.actor.fsdp_config.wrap_policy",
    "actor_rollout_ref.ref.fsdp_config.wrap_policy",
    "critic.fsdp.wrap_policy",
    "ray_kwargs.ray_init",
    "global_profiler.global_tool_config.nsys.controller_nsight_options",
    "global_profiler.global_tool_config.nsys.worker_nsight_options",
)


def check_types(
    settings: Mapping[str, Any], defaults: Mapping[str, Any], added: Collection[str] = ()
) -> None:
    """Hold the user's settings against the classes that verl builds from them, or the defaults.

    Args:
        settings: what the user has set, as a tree.
        defaults: verl's and agl_fast's. Neither has interpolations.
        added: dotted keys that the user has marked as new.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is none of those to choose from, or there is no such key. Both name the
            key, its value and what is expected.
    """
    found = _Findings(added)
    found.check_group("", settings, defaults, {"agentlightning": AgentLightningKeys}, None)
    if found.unknown:
        raise unknown_keys_error(found.unknown, defaults)
    if found.errors:
        raise found.errors[0]


class _Findings:
    """What is wrong with a tree of settings: unknown keys are named before wrong values."""

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
        for name, value in settings.items():
            key, hint, default = f"{prefix}{name}", hints.get(name, Any), defaults.get(name)
            if name in hints or name in defaults or name == "_target_" or key in UNLISTED:
                self._check_value(key, value, hint, default)
            else:
                self._check_new(key, value, {*hints, *defaults}, declared)
                continue
            if not isinstance(value, Mapping) or key in FREE:
                continue
            below = default if isinstance(default, Mapping) else {}
            child = _class_of({**below, **value}, hint)
            if child is not None or below:
                child_hints = get_type_hints(child) if child else {}
                self.check_group(f"{key}.", value, below, child_hints, child)

    def _check_value(self, key: str, value: Any, hint: Any, default: Any) -> None:
        try:
            _check_value(key, value, hint, default)
        except (TypeError, ValueError) as error:
            self.errors.append(error)

    def _check_new(self, key: str, value: Any, known: set[str], declared: type | None) -> None:
        of_verl = declared is not None and declared.__module__ != OWN
        if not of_verl:
            if not is_allowed(key, self._added):
                self.unknown.append(key)
            return
        # verl passes every key of the group to the class, which refuses it, added or not.
        assert declared is not None
        close = difflib.get_close_matches(key.rpartition(".")[2], sorted(known), n=1)
        meant = f"did you mean {close[0]}?" if close else f"it has {', '.join(sorted(known))}"
        self.errors.append(
            ValueError(
                f"{key}={value!r}: expected no such key, as verl's {declared.__name__} has none; "
                f"{meant}"
            )
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


def _check_value(key: str, value: Any, hint: Any, default: Any) -> None:
    if value is None and default is None:
        return
    if hint is Any:
        if default is None:
            return
        hint = type(default)
    if _matches(value, hint) or isinstance(value, ALSO_ALLOWED.get(key, ())):
        return
    if isinstance(value, list) and default is None:
        return  # verl annotates some of its lists as optional strings
    choices = [choice for option in _options(hint) for choice in _choices(option)]
    if choices:
        raise ValueError(f"{key}={value!r}: expected one of {', '.join(map(str, choices))}")
    expected = " or ".join(_name(option) for option in _options(hint))
    raise TypeError(f"{key}={value!r}: expected {expected}, got {_name(type(value))}")


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _choices(option: Any) -> tuple[Any, ...]:
    return get_args(option) if get_origin(option) is Literal else ()


def _matches(value: Any, hint: Any) -> bool:
    options = _options(hint)
    if len(options) > 1:
        return any(_matches(value, option) for option in options)
    origin = get_origin(hint) or hint
    if hint is Any:
        return True
    if origin is Literal:
        return value in get_args(hint)
    if origin is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if origin is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin in (list, tuple):
        element = (get_args(hint) or (Any,))[0]
        return isinstance(value, list) and all(_matches(item, element) for item in value)
    if origin in (dict, Mapping) or is_dataclass(origin):
        return isinstance(value, Mapping)
    return not isinstance(origin, type) or isinstance(value, origin)


def _name(hint: Any) -> str:
    if hint is type(None):
        return "null"
    if is_dataclass(hint):
        return "a mapping"
    return {"bool": "true or false", "dict": "a mapping", "list": "a list", "tuple": "a list"}.get(
        getattr(hint, "__name__", ""), getattr(hint, "__name__", str(hint))
    )
