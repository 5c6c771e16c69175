"""How long `import agl_fast` takes in a fresh interpreter."""

import subprocess
import sys

_PROGRAM = """
import time
start = time.perf_counter()
import agl_fast
print(time.perf_counter() - start)
"""


def import_seconds(rounds: int = 7) -> list[float]:
    """Seconds of each of `rounds` imports, each in a process of its own."""
    command = [sys.executable, "-c", _PROGRAM]
    return [
        float(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        for _ in range(rounds)
    ]
