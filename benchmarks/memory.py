"""Peak memory of one `build_batch`, alone in its process: `python -m benchmarks.memory`.

Prints JSON: bytes that building took above what the process held before (its input among it), and
bytes of the tensors that came out.
"""

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WORK = "peak memory above the input / bytes of the output, 256 × 10 padded, lists"
TARGET = 1.15


def measure_in_subprocess() -> dict[str, Any]:
    """{"above_input": bytes, "output": bytes}"""
    command = [sys.executable, "-m", "benchmarks.memory"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout)


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def peak_resident_bytes() -> int:
    """Of this program; getrusage's peak would be that of the process it was forked from."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    import agl_fast
    from benchmarks.answers import bytes_of
    from benchmarks.competitors import grown, options
    from benchmarks.conversations import as_lists, for_agl_fast
    from benchmarks.workload import FULL, TINY

    agl_fast.build_batch(for_agl_fast(grown(TINY)), **options(TINY))  # loads what is loaded late
    rollouts = for_agl_fast(as_lists(grown(FULL)))
    before = resident_bytes()
    batch = agl_fast.build_batch(rollouts, **options(FULL))
    above_input = peak_resident_bytes() - before
    json.dump({"above_input": above_input, "output": bytes_of(batch.tensors)}, sys.stdout)


if __name__ == "__main__":
    main()
