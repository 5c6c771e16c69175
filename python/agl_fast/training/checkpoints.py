"""Checkpoints that a full disk or a killed run left incomplete."""

from __future__ import annotations

import os
import re
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl.utils.checkpoint.checkpoint_manager import get_checkpoint_tracker_filename


@contextmanager
def last_whole_checkpoint(folder: str, step: int) -> Iterator[None]:
    """If saving a checkpoint fails, let the next run resume from the last complete one.

    verl empties its tracker file before writing it, and with `trainer.max_actor_ckpt_to_keep=1`
    removes the previous checkpoint as soon as the actor's new one exists.

    Args:
        folder: `trainer.default_local_dir`.
        step: the step whose checkpoint the block saves.

    Raises:
        RuntimeError: saving failed; the error is the cause, and the message names the last complete
            checkpoint.
    """
    root = Path(folder).absolute()
    tracker = Path(get_checkpoint_tracker_filename(str(root)))
    before = _step_in(tracker)
    weights = [] if before is None else _weights(root, before)
    try:
        yield
    except BaseException as error:
        exists = before is not None and all(path.is_dir() for path in weights)
        whole = _last_whole(root, step, before if exists else None, replaces=before is not None)
        outlook = _point(tracker, whole)
        if not isinstance(error, Exception):
            raise
        raise RuntimeError(
            f"saving the checkpoint of step {step} in {root} failed: {error}. {outlook}"
        ) from error


def point_to_loadable_checkpoint(config: Any, parts: Sequence[str]) -> str | None:
    """Let the tracker name a checkpoint that can be loaded, where a killed run left another one.

    SIGKILL leaves no time for `last_whole_checkpoint`. The tracker file may be empty then, and with
    `trainer.max_actor_ckpt_to_keep=1` the checkpoint that it names may be gone, although the next
    one is whole. A tracker whose checkpoint can be loaded is left alone.

    Args:
        config: of the run that resumes.
        parts: what it loads: "actor", and "critic" if there is one.

    Returns:
        What was wrong and is done about it; None: nothing, or `trainer.resume_mode` is not auto.

    Raises:
        RuntimeError: there are checkpoints, and none of them can be loaded.
    """
    root = Path(config.trainer.default_local_dir).absolute()
    tracker = Path(get_checkpoint_tracker_filename(str(root)))
    if config.trainer.resume_mode != "auto" or not tracker.is_file():
        return None
    named = _step_in(tracker)
    steps = _steps(root)
    # Where a driver has no workers on its machine, their files are on others.
    parts = [part for part in parts if any((_folder(root, step) / part).is_dir() for step in steps)]
    flaws = {step: _flaw(_folder(root, step), config, parts) for step in steps}
    if named is not None and not flaws.get(named):
        return None  # also where its folder was removed: verl starts from scratch
    found = f"{tracker} names no step" if named is None else f"global_step_{named}: {flaws[named]}"
    whole = max((step for step, flaw in flaws.items() if not flaw), default=None)
    if whole is None:
        others = [f"global_step_{step}: {flaw}" for step, flaw in flaws.items() if step != named]
        raise RuntimeError(
            f"no checkpoint in {root} can be loaded: {'; '.join([found, *others])}. To start from "
            f"scratch, remove {tracker}, or set trainer.resume_mode=disable"
        )
    data = _folder(root, whole) / "data.pt"
    if not _can_be_read(data):
        data.unlink(missing_ok=True)  # the data loader starts anew
    tracker.write_text(str(whole))
    return f"{found}; the run resumes from global_step_{whole}"


def remove_lock(checkpoint: str) -> None:
    """Remove the file that verl 0.9.1's `local_mkdir_safe` leaves for every checkpoint's folder.

    It is in the temporary folder, under a name that differs in every process.
    """
    path = os.path.join(os.getcwd(), checkpoint)
    lock = Path(tempfile.gettempdir()) / f"ckpt_{hash(path) & 0xFFFFFFFF:08x}.lock"
    lock.unlink(missing_ok=True)


def _steps(root: Path) -> list[int]:
    names = (re.fullmatch(r"global_step_(\d+)", path.name) for path in root.iterdir())
    return sorted(int(name[1]) for name in names if name)


def _folder(root: Path, step: int) -> Path:
    return root / f"global_step_{step}"


def _flaw(checkpoint: Path, config: Any, parts: Sequence[str]) -> str:
    """Why it cannot be loaded; empty: its files are there, and each has its end."""
    trainer = config.trainer
    n_ranks = trainer.nnodes * trainer.n_gpus_per_node
    for part in parts:
        folder = checkpoint / part
        if not folder.is_dir():
            return f"{part} is missing"
        settings = config.actor_rollout_ref.actor if part == "actor" else config.critic
        if settings.strategy not in ("fsdp", "fsdp2"):
            continue
        kinds = [_FILES[each] for each in settings.checkpoint.load_contents if each in _FILES]
        for name in (f"{kind}_world_size_{n_ranks}_rank_{{}}.pt" for kind in kinds):
            files = [folder / name.format(rank) for rank in range(n_ranks)]
            there = [file for file in files if file.is_file()]
            # Ranks of other machines may have saved theirs there.
            if not there or (trainer.nnodes == 1 and len(there) < n_ranks):
                if saved_by := _n_ranks(folder) - {n_ranks}:
                    return f"{part} was saved by {min(saved_by)} ranks, and the run has {n_ranks}"
                missing = next(file.name for file in files if file not in there)
                return f"{part}/{missing} is missing"
            cut_off = [file.name for file in there if not zipfile.is_zipfile(file)]
            if cut_off:  # torch.save writes a file's end last
                return f"{part}/{cut_off[0]} is cut off"
    return ""


def _n_ranks(folder: Path) -> set[int]:
    names = (re.search(r"_world_size_(\d+)_rank_", path.name) for path in folder.iterdir())
    return {int(name[1]) for name in names if name}


# verl's names in `load_contents`, and how its files begin.
_FILES = {"model": "model", "optimizer": "optim", "extra": "extra_state"}


def last_saved_step(folder: str) -> int | None:
    """The step after which `trainer.resume_mode=auto` continues; `folder` is default_local_dir."""
    return _step_in(Path(get_checkpoint_tracker_filename(str(Path(folder).absolute()))))


def last_checkpoint(folder: str | None) -> Path | None:
    """The folder of the checkpoint that a new run would resume from; None without one."""
    step = None if folder is None else last_saved_step(folder)
    if folder is None or step is None:
        return None
    checkpoint = Path(folder).absolute() / f"global_step_{step}"
    return checkpoint if checkpoint.is_dir() else None


def _step_in(tracker: Path) -> int | None:
    text = tracker.read_text().strip() if tracker.is_file() else ""
    return int(text) if text.isdecimal() else None


def _weights(root: Path, step: int) -> list[Path]:
    """Existing folders of actor and critic."""
    parts = (_folder(root, step) / part for part in ("actor", "critic"))
    return [path for path in parts if path.is_dir()]


def _last_whole(root: Path, step: int, before: int | None, *, replaces: bool) -> int | None:
    """The last step with a complete checkpoint.

    Args:
        before: the step of the previous checkpoint, if it still exists.
        replaces: there was a previous checkpoint.
    """
    data = _folder(root, step) / "data.pt"  # verl writes it after all weights
    if _can_be_read(data):
        return step
    data.unlink(missing_ok=True)
    if before is not None:
        return before
    # verl removes the previous one only after the actor's new one is complete, before the critic's.
    is_actor_alone = [path.name for path in _weights(root, step)] == ["actor"]
    return step if replaces and is_actor_alone else None


def _can_be_read(data: Path) -> bool:
    if not data.is_file():
        return False
    try:
        with zipfile.ZipFile(data) as archive:  # torch.save's format; unpickles nothing
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile):  # incomplete
        return False


def _point(tracker: Path, step: int | None) -> str:
    """Write the step into the tracker; a sentence about the next run."""
    try:
        if step is None:
            tracker.unlink(missing_ok=True)
            return "There is no whole checkpoint: the next run starts from scratch"
        if _step_in(tracker) != step:
            tracker.write_text(str(step))
    except OSError as error:
        return f"Before the next run, write {step} into {tracker}, which failed as well: {error}"
    return f"The next run resumes from global_step_{step}"
