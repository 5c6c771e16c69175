"""The options of rows: names, types, defaults, valid values, and where each is stored.

A new option is a field of `RowOptions` and an entry of `RowKeywords`. `build_batch`,
`BatchBuilder`, the reference, recordings, replay, `analyze`, `dry_run` and the daemon read them
from here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, cast, get_args

from agl_fast.ops.argument_checks import INT32_MAX, INT64_MAX, INT64_MIN, integer
from agl_fast.rows.levels import Level, LevelName
from agl_fast.rows.rewards import read_reward

if TYPE_CHECKING:
    from typing_extensions import Required

F = TypeVar("F", bound=Callable[..., Any])
Check = Callable[[str, Any], Any]

OverlongPrompt = Literal["drop", "spill"]
TruncatedRollouts = Literal["train", "mask", "zero_reward"]
Layout = Literal["padded", "jagged"]

NO_LIMIT = 2**30
TREE_MAX_TOKENS = 16384

_AGGREGATOR = "agentlightning.trace_aggregator"
# Defaults of a configuration that differ from those of `build_batch`.
_CONFIG_DEFAULTS: dict[str, Any] = {"level": "transition", "trim": True}


class CommonRowKeywords(TypedDict, total=False):
    """Keyword arguments that `build_batch` and `dry_run` share."""

    level: LevelName
    max_total_length: int | None
    overlong_prompt: OverlongPrompt | None
    truncated_rollouts: TruncatedRollouts
    tree_max_tokens: int
    reward_fillna_value: float


class RowKeywords(CommonRowKeywords, total=False):
    """Keyword arguments of `build_batch`."""

    max_prompt_length: Required[int]
    max_response_length: Required[int]
    pad_token_id: Required[int]
    trim: bool
    layout: Layout
    call_index: bool
    tokenizer: Any


def _one_of(*allowed: object) -> Check:
    def check(name: str, value: Any) -> Any:
        if value not in allowed:
            known = ", ".join(str(one) for one in allowed if one is not None)
            raise ValueError(f"{name} must be one of {known}; got {value!r}")
        return value

    return check


def _integer(low: int, high: int, *, optional: bool = False) -> Check:
    def check(name: str, value: Any) -> Any:
        return None if optional and value is None else integer(name, value, low, high)

    return check


def _bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def _finite(name: str, value: Any) -> float:
    number = read_reward(value, name)
    if number is None:
        error = TypeError if value is None else ValueError
        raise error(f"{name} must be finite, got {value!r}")
    return number


def _tokenizer(name: str, value: Any) -> Any:
    if value is not None and not callable(getattr(value, "decode", None)):
        raise TypeError(f"{name} must have a decode method, got {value!r}")
    return value


def _level(name: str, value: Any) -> str:
    return Level.of(value).name


def _option(check: Check, *, group: str | None = None, recorded: bool = True) -> dict[str, Any]:
    """Metadata of a field.

    Args:
        check: returns the valid value; raises TypeError or ValueError with the option's name.
        group: of the configuration key of the same name; None: no key, or one per level
            (`Level.keys`).
        recorded: whether a recording's header contains it.
    """
    return {"check": check, "group": group, "recorded": recorded}


_LENGTH = _integer(1, INT32_MAX)
_OPTIONAL_LENGTH = _integer(1, INT32_MAX, optional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """How rollouts become rows.

    Attributes:
        level: ``transition``, one row per call; ``trajectory``, calls merge into one row where a
            prompt extends the context before it; ``tree``, one row per rollout, the prefix
            tree of its calls (docs/tree.md). Tree rows are as wide as they are: the lengths,
            ``overlong_prompt``, ``truncated_rollouts`` and ``trim`` are checked and not used.
        max_prompt_length: P, at least 1.
        max_response_length: R, at least 1; a row keeps the first R response tokens.
        max_total_length: limit on a row's prompt and response together; None: no limit.
        pad_token_id: id of padding.
        overlong_prompt: ``spill`` moves the tokens past P into the response, untrained; ``drop``
            keeps the first P and excludes the row from the update. None: ``drop`` at level
            transition, else ``spill``.
        truncated_rollouts: what happens to a rollout that lost sampled tokens to a limit:
            ``train`` on the rest, ``mask`` its rows, or train with ``zero_reward``.
        tree_max_tokens: level tree: a rollout whose tree has more tokens becomes several rows; a
            call that has more is dropped.
        reward_fillna_value: reward of rollouts that have none.
        trim: widths are the longest prompt and response of the batch instead of P and R.
        layout: ``padded`` or ``jagged`` (nested tensors).
        call_index: also return the call that sampled each response token.
        tokenizer: object with ``decode``; distinguishes retokenized text from rewritten history.

    Raises:
        TypeError, ValueError: an option has the wrong type or value; the message names it.
    """

    level: LevelName = field(default="trajectory", metadata=_option(_level, group=_AGGREGATOR))
    max_prompt_length: int = field(metadata=_option(_LENGTH))
    max_response_length: int = field(metadata=_option(_LENGTH))
    max_total_length: int | None = field(default=None, metadata=_option(_OPTIONAL_LENGTH))
    overlong_prompt: OverlongPrompt | None = field(
        default=None, metadata=_option(_one_of(None, *get_args(OverlongPrompt)), group=_AGGREGATOR)
    )
    truncated_rollouts: TruncatedRollouts = field(
        default="train", metadata=_option(_one_of(*get_args(TruncatedRollouts)), group=_AGGREGATOR)
    )
    tree_max_tokens: int = field(
        default=TREE_MAX_TOKENS, metadata=_option(_LENGTH, group=_AGGREGATOR)
    )
    trim: bool = field(default=False, metadata=_option(_bool, group=_AGGREGATOR))
    pad_token_id: int = field(metadata=_option(_integer(INT64_MIN, INT64_MAX)))
    reward_fillna_value: float = field(
        default=0.0, metadata=_option(_finite, group="agentlightning")
    )
    layout: Layout = field(
        default="padded", metadata=_option(_one_of(*get_args(Layout)), recorded=False)
    )
    call_index: bool = field(default=False, metadata=_option(_bool, recorded=False))
    tokenizer: Any = field(default=None, metadata=_option(_tokenizer, recorded=False))

    def __post_init__(self) -> None:
        for each in fields(self):
            valid = each.metadata["check"](each.name, getattr(self, each.name))
            object.__setattr__(self, each.name, valid)

    @property
    def rules(self) -> Level:
        """The level's properties."""
        return Level.of(self.level)

    @property
    def drops_overlong(self) -> bool:
        """Whether a row with a longer prompt than P is excluded from the update."""
        default = "drop" if self.rules.row_is_call else "spill"
        return (self.overlong_prompt or default) == "drop"

    @property
    def masks_truncated(self) -> bool:
        """Whether the rows of rollouts that lost tokens to a limit are excluded from the update."""
        return self.truncated_rollouts == "mask"

    @property
    def zeroes_truncated(self) -> bool:
        """Whether rollouts that lost tokens to a limit get reward 0."""
        return self.truncated_rollouts == "zero_reward"

    @property
    def trims(self) -> bool:
        """Whether tensors are as wide as the longest prompt and response of the batch."""
        return self.trim or self.rules.is_tree

    @property
    def row_limits(self) -> tuple[int, int]:
        """Largest number of tokens in a row's prompt, and in its response."""
        if self.rules.is_tree:
            return self.tree_max_tokens, self.tree_max_tokens
        return self.max_prompt_length, self.max_response_length

    @property
    def row_length_options(self) -> tuple[str, ...]:
        """Names of the options whose sum is the length of the longest row."""
        return self.rules.row_length_options(has_total_limit=self.max_total_length is not None)

    def keywords(self, **changes: Any) -> RowKeywords:
        """These options as keyword arguments of `build_batch` and `BatchBuilder`, with changes."""
        changed = replace(self, **changes)
        return cast(
            "RowKeywords", {each.name: getattr(changed, each.name) for each in fields(changed)}
        )

    def to_header(self) -> dict[str, Any]:
        """The options as `about.rows` of a recording (docs/recording.md)."""
        recorded = [each.name for each in fields(self) if each.metadata["recorded"]]
        return {name: getattr(self, name) for name in recorded}

    def to_config(self) -> dict[str, Any]:
        """The options as a configuration tree."""
        return header_to_config(self.to_header())

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **others: Any) -> RowOptions:
        """Read the options from a configuration.

        Args:
            config: the whole tree; missing keys have config.yaml's defaults.
            others: options by name, which replace the configured ones; ``pad_token_id``, which no
                configuration contains, is 0 by default.

        Raises:
            TypeError, ValueError: an option is missing or wrong; the message names it.
        """
        level = others.get("level") or _select(config, f"{_AGGREGATOR}.level")
        if level is MISSING:
            level = _CONFIG_DEFAULTS["level"]
        values = {name: _select(config, key) for name, key in config_keys(level).items()}
        found = {name: value for name, value in values.items() if value is not MISSING}
        return cls(**{"pad_token_id": 0, **_CONFIG_DEFAULTS, **found, **others})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one level's rows, named as the arguments of `build_batch`; None: no limit."""

    max_prompt_length: int | None = None
    max_response_length: int | None = None
    max_total_length: int | None = None
    tree_max_tokens: int | None = None
    overlong_prompt: OverlongPrompt | None = None
    truncated_rollouts: TruncatedRollouts = "train"

    def options(self, level: LevelName, **others: Any) -> RowOptions:
        """Row options with these limits.

        Raises:
            TypeError, ValueError: an option has the wrong type or value; the message names it.
        """
        limits = _without_none({each.name: getattr(self, each.name) for each in fields(self)})
        widest = dict.fromkeys(_UNLIMITED, NO_LIMIT)
        return RowOptions(**{**widest, **limits, "level": level, "pad_token_id": 0, **others})


_UNLIMITED = ("max_prompt_length", "max_response_length", "tree_max_tokens")
_RULES = ("overlong_prompt", "truncated_rollouts")


def limits_of(
    level: LevelName, about: Mapping[str, Any] | None, given: Mapping[str, int | None] | None
) -> Limits:
    """Find the limits of a level's rows.

    Args:
        about: a recording's header (docs/recording.md). Its row options apply to the run's own
            level. The limits of another level are those of the run's settings, where set.
        given: limits by name that replace the header's; None: not given.

    Raises:
        TypeError: a group of the header is not an object.
    """
    at = Level.of(level)
    rows, settings = _group(about or {}, "rows"), _group(about or {}, "settings")
    same_at_all_levels = {each.name for each in fields(RowOptions) if each.metadata["group"]}
    found: dict[str, Any] = {}
    for name in at.limits if at.is_tree else (*at.limits, *_RULES):
        if name in same_at_all_levels or rows.get("level") == level:
            found[name] = rows.get(name)
        elif name in at.keys:
            *groups, key = at.keys[name].split(".")
            found[name] = _group(settings, *groups).get(key)
    known = {name: value for name, value in (given or {}).items() if name in at.limits}
    return Limits(**{**_without_none(found), **_without_none(known)})


def config_keys(level: str) -> dict[str, str]:
    """Map each row option that has a configuration key at a level to the key."""
    groups = {each.name: each.metadata["group"] for each in fields(RowOptions)}
    same_at_all_levels = {name: f"{group}.{name}" for name, group in groups.items() if group}
    return {**same_at_all_levels, **Level.of(level).keys}


def header_to_config(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `about.rows` of a recording to a configuration tree.

    Args:
        rows: as read. Options that the recording's version did not have are left to config.yaml.
    """
    tree: dict[str, Any] = {}
    for name, key in config_keys(rows.get("level", _CONFIG_DEFAULTS["level"])).items():
        if rows.get(name) is None:
            continue
        *groups, last = key.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[last] = rows[name]
    return tree


def lists_row_options(keywords: type[Any]) -> Callable[[F], F]:
    """Show row options in place of ``**options`` in `help` and `inspect.signature`.

    Args:
        keywords: TypedDict of the options that the function accepts.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = list(signature.parameters.values())
        options = [
            option
            for option in inspect.signature(RowOptions).parameters.values()
            if option.name in keywords.__annotations__
        ]
        named = [each for each in own if each.kind is not inspect.Parameter.VAR_KEYWORD]
        first = [each for each in named if each.kind is not inspect.Parameter.KEYWORD_ONLY]
        rest = [each for each in named if each.kind is inspect.Parameter.KEYWORD_ONLY]
        cast(Any, function).__signature__ = signature.replace(parameters=[*first, *options, *rest])
        return function

    return decorate


def _select(config: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; MISSING where there is none."""
    node: Any = config
    for name in key.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return MISSING
        node = node[name]
    return node


def _group(parent: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    for name in names:
        group = parent.get(name)
        if not isinstance(group, Mapping | None):
            raise TypeError(f"{name}: expected an object in the recording's header, got {group!r}")
        parent = group or {}
    return parent


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
