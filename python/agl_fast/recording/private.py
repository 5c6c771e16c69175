"""Files that only their owner reads: what agents said may be confidential."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER_MODE = 0o700
FILE_MODE = 0o600


def private_folder(folder: Path) -> None:
    """Make a folder of mode 0700, and its parents as usual. One that is there stays as it is."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=FOLDER_MODE, exist_ok=True)


def private_opener(path: str, flags: int) -> int:
    """An ``opener`` of ``open``: new files get the mode 0600."""
    return os.open(path, flags, FILE_MODE)
