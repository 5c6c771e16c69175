"""A checkpoint that could not be written whole, as on a full disk."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl.utils.checkpoint.checkpoint_manager import get_checkpoint_tracker_filename


@contextmanager
def last_whole_checkpoint(folder: str, step: int) -> Iterator[None]:
    """Where the block fails, leave `folder` so that the next run resumes from what is whole.

    verl empties its tracker file before it writes it, and with `trainer.max_actor_ckpt_to_keep=1`
    removes the checkpoint before as soon as the actor's new one is there.

    Args:
        folder: `trainer.default_local_dir`.
        step: whose checkpoint the block saves.

    Raises:
        RuntimeError: the block raised, which is the cause; the message names the last whole
            checkpoint.
    """
    root = Path(folder).absolute()
    tracker = Path(get_checkpoint_tracker_filename(str(root)))
    before = _step_in(tracker)
    weights = [] if before is None else _weights(root, before)
    try:
        yield
    except BaseException as error:
        is_there = before is not None and all(path.is_dir() for path in weights)
        whole = _last_whole(root, step, before if is_there else None, replaces=before is not None)
        said = _point(tracker, whole)
        if not isinstance(error, Exception):
            raise
        raise RuntimeError(
            f"saving the checkpoint of step {step} in {root} failed: {error}. {said}"
        ) from error


def last_saved_step(folder: str) -> int | None:
    """The step that `trainer.resume_mode=auto` continues after; `folder` is default_local_dir."""
    return _step_in(Path(get_checkpoint_tracker_filename(str(Path(folder).absolute()))))


def _step_in(tracker: Path) -> int | None:
    text = tracker.read_text().strip() if tracker.is_file() else ""
    return int(text) if text.isdecimal() else None


def _weights(root: Path, step: int) -> list[Path]:
    """Folders of actor and critic, where they are on this machine."""
    parts = (root / f"global_step_{step}" / part for part in ("actor", "critic"))
    return [path for path in parts if path.is_dir()]


def _last_whole(root: Path, step: int, before: int | None, *, replaces: bool) -> int | None:
    """
    Args:
        before: the last step with a checkpoint, if that is still there.
        replaces: there was one before.
    """
    data = root / f"global_step_{step}" / "data.pt"  # verl writes it after all weights
    if _can_be_read(data):
        return step
    data.unlink(missing_ok=True)
    if before is not None:
        return before
    # The one before goes only when the actor's new one is whole; a critic's is saved after it.
    is_actor_alone = [path.name for path in _weights(root, step)] == ["actor"]
    return step if replaces and is_actor_alone else None


def _can_be_read(data: Path) -> bool:
    if not data.is_file():
        return False
    try:
        with zipfile.ZipFile(data) as archive:  # torch.save's format; nothing is unpickled
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile):  # a part of it
        return False


def _point(tracker: Path, step: int | None) -> str:
    """Let the tracker name the step, and say what the next run does."""
    try:
        if step is None:
            tracker.unlink(missing_ok=True)
            return "There is no whole checkpoint: the next run starts from scratch"
        if _step_in(tracker) != step:
            tracker.write_text(str(step))
    except OSError as error:
        return f"Before the next run, write {step} into {tracker}, which failed as well: {error}"
    return f"The next run resumes from global_step_{step}"
