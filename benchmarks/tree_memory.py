"""Peak memory of a gradient, each in its process: `python -m benchmarks.tree_memory`.

Of trees and of merged rows of swe_plain, where both have the same tokens: bytes above what the
process held before, with its model and its rows.
"""

import json
import subprocess
import sys

from benchmarks import report
from benchmarks.memory import ROOT, peak_resident_bytes, resident_bytes
from benchmarks.workload import FULL, Size

WORK = "peak memory of a gradient from a tree / from a merged row of the same tokens"
TARGET = 1.2


def peak_of(competitor: str, size: Size) -> int:
    """Bytes above what was held before, in this process."""
    import torch

    from benchmarks import tree_update

    torch.set_num_threads(1)
    prepared = tree_update.prepare("swe_plain", size)
    before = resident_bytes()
    prepared.competitors[competitor].run()
    return peak_resident_bytes() - before


def measure() -> report.Line:
    peaks = {}
    for competitor in ("merged", "trees"):
        command = [sys.executable, "-m", "benchmarks.tree_memory", competitor]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
        peaks[competitor] = json.loads(done.stdout)
    ratio = peaks["trees"] / peaks["merged"]
    line = report.Line(WORK, None, None, ratio, TARGET, at_most=True)
    report.write_measurement("tree_memory", [line], {"bytes": peaks})
    return line


if __name__ == "__main__":
    if len(sys.argv) > 1:
        json.dump(peak_of(sys.argv[1], FULL), sys.stdout)
    else:
        print(report.table([measure()]))
