"""A process that ends with its parent, also when that was killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_CHECK_SECONDS = 1.0
_GRACE_SECONDS = 5.0


def end_with_parent(parent_pid: int) -> None:
    """Send this process SIGTERM when its parent ends, and SIGKILL some seconds later.

    On Linux the kernel sends the first signal at once; elsewhere, and where that signal is
    caught, a thread sees the death within a second.

    Args:
        parent_pid: of the parent, as it was before the fork: it may have ended since.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    threading.Thread(
        target=_end_after, args=(parent_pid,), name="agl_fast-parent", daemon=True
    ).start()


def _end_after(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_CHECK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
