"""Checkpoints: resume after one that was written incompletely, as on a full disk."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
    parts = (root / f"global_step_{step}" / part for part in ("actor", "critic"))
    return [path for path in parts if path.is_dir()]


def _last_whole(root: Path, step: int, before: int | None, *, replaces: bool) -> int | None:
    """The last step with a complete checkpoint.

    Args:
        before: the step of the previous checkpoint, if it still exists.
        replaces: there was a previous checkpoint.
    """
    data = root / f"global_step_{step}" / "data.pt"  # written after all weights
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
