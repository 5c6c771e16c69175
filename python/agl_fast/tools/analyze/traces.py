"""Read files of calls with their limits."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from agl_fast.recording import Recording, RecordingError, read_recording
from agl_fast.rows.calls import Rollout
from agl_fast.rows.levels import LEVELS, LevelName
from agl_fast.rows.options import Limits, limits_of
from agl_fast.tools.analyze.model_shape import ModelConfigError, read_tree_refusals


@dataclass(frozen=True, slots=True, eq=False)
class Traces:
    """Recorded rollouts.

    Attributes:
        source: file names or URL.
        rollouts: with unique rollout_ids.
        limits: per level.
        notes: what was not read, in words.
        tree_refusals: why level tree does not support the recorded run's model; empty if it does,
            or if the model's configuration cannot be read.
    """

    source: str
    rollouts: Sequence[Rollout]
    limits: Mapping[LevelName, Limits]
    notes: Sequence[str] = ()
    tree_refusals: Sequence[str] = ()


def read_traces(
    paths: Sequence[str | os.PathLike[str]], given: Mapping[str, int | None] | None = None
) -> Traces:
    """Read recordings and files of token traces (docs/recording.md) together.

    Args:
        paths: of the files; with several, ids are prefixed by the path.
        given: limits by name that replace those of the headers; None: not given.

    Raises:
        OSError: a file cannot be read.
        RecordingError: a file is not a valid recording, or has no rollouts.
        ValueError: the headers of the files have different limits, and none is given.
        TypeError: a group of a header is not an object.
    """
    recordings = [read_recording(path) for path in paths]
    limits = {level: _limits(recordings, level, given) for level in LEVELS}
    rollouts = []
    for recording in recordings:
        if not recording.rollouts:
            raise RecordingError(f"{recording.path}: there are no rollouts")
        for rollout in recording.rollouts:
            if len(recordings) > 1:
                rollout.rollout_id = f"{recording.path}: {rollout.rollout_id}"
                rollout.data_id = f"{recording.path}: {rollout.data_id}"
            rollouts.append(rollout)
    return Traces(
        ", ".join(str(recording.path) for recording in recordings),
        rollouts,
        limits,
        tree_refusals=_tree_refusals(recordings[0].about) if recordings else (),
    )


def _tree_refusals(about: Mapping[str, Any]) -> Sequence[str]:
    """Refusals of the run's model, if it is a local folder."""
    found: Any = about.get("settings")
    for name in ("actor_rollout_ref", "model", "path"):
        found = found.get(name) if isinstance(found, Mapping) else None
    if not isinstance(found, str) or not (Path(found) / "config.json").is_file():
        return ()
    try:
        return read_tree_refusals(found)
    except (OSError, ModelConfigError):
        return ()


def _limits(
    recordings: Sequence[Recording], level: LevelName, given: Mapping[str, int | None] | None
) -> Limits:
    first, *others = (limits_of(level, each.about, given) for each in recordings)
    for recording, other in zip(recordings[1:], others, strict=True):
        for each in fields(Limits):
            one, another = getattr(first, each.name), getattr(other, each.name)
            if one != another:
                raise ValueError(
                    f"{each.name}: at level {level}, {recordings[0].path} was recorded with {one} "
                    f"and {recording.path} with {another}: give one for all, or analyze the files "
                    "one by one"
                )
    return first
