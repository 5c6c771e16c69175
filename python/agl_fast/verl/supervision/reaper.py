"""Clean up after a run whose driver was killed: `python -m agl_fast.verl.supervision.reaper PID`.

The driver starts it with the run's scope on standard input, and kills it when the run has ended.
Meanwhile it notes which shared memory the run's processes map: most of it has no owner afterwards.
When the driver dies first, Ray's processes of the run, their shared memory and the temporary folder
are removed here.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time

from agl_fast.verl.supervision.log_output import messages_shown
from agl_fast.verl.supervision.run_scope import RunScope

logger = logging.getLogger(__name__)

_CHECK_SECONDS = 0.5
_GRACE_SECONDS = 5.0
# Between two looks at what is mapped: at least so long, and so many times what a look takes.
_NOTE_SECONDS, _NOTE_PAUSES = 5.0, 100


def main(driver: int) -> int:
    """Exit status: 0, or 1 where something could not be removed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # Slurm sends it to every process of a job
        signal.signal(number, signal.SIG_IGN)
    text = sys.stdin.read()
    if not text:
        return 0  # the driver died before it started anything
    scope, next_note = RunScope.from_json(text), 0.0
    while os.getppid() == driver:
        time.sleep(_CHECK_SECONDS)
        begin = time.monotonic()
        if begin >= next_note:
            scope.note_segments()
            end = time.monotonic()
            next_note = end + max(_NOTE_SECONDS, _NOTE_PAUSES * (end - begin))
    left, logs = scope.clean_up(grace_seconds=_GRACE_SECONDS, failed=True)
    said = f"process {driver}, the driver of a run, was killed; what it left is removed"
    if logs is not None:
        said += f". Ray's logs are kept in {logs}"
    if left:
        said += f". Left behind: {', '.join(left)}"
    with messages_shown():
        logger.warning("%s", said)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
