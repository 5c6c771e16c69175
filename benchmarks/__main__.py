"""`python -m benchmarks [NAME ...]`: measure, print the table, write `benchmarks/results/`.

Without names everything is measured; names are those of the files in `benchmarks/results/`.
"""

import argparse
import gc
import time

import torch

from benchmarks import memory, report
from benchmarks.import_time import import_seconds
from benchmarks.report import Line
from benchmarks.workload import FULL, Workload, limited_threads, time_interleaved
from benchmarks.workloads import WORKLOADS


def measure(workload: Workload) -> list[Line]:
    prepared = workload.prepare(FULL)
    with limited_threads(workload.threads):
        times = time_interleaved(prepared, workload.rounds)
    lines = [report.line_of(row, times.seconds) for row in workload.rows]
    report.write_measurement(workload.name, lines, times._asdict())
    return lines


def measure_memory() -> list[Line]:
    measured = memory.measure_in_subprocess()
    ratio = measured["above_input"] / measured["output"]
    lines = [Line(memory.WORK, None, None, ratio, memory.TARGET, at_most=True)]
    report.write_measurement("memory", lines, measured)
    return lines


def main() -> None:
    known = [workload.name for workload in WORKLOADS] + ["memory"]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    names = parser.parse_args().names or known
    unknown = set(names) - set(known)
    if unknown:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")

    lines, notes = [], []
    for workload in WORKLOADS:
        if workload.name not in names:
            continue
        if workload.needs_cuda and not torch.cuda.is_available():
            notes.append(f"Skipped: {workload.name} (no CUDA device).")
            continue
        start = time.perf_counter()
        lines += measure(workload)
        print(f"{workload.name}: {time.perf_counter() - start:.0f} s", flush=True)
        gc.collect()
    if "memory" in names:
        lines += measure_memory()
    notes.append(f"`import agl_fast`: {1000 * min(import_seconds()):.1f} ms.")
    print(report.write_table(lines, notes))


if __name__ == "__main__":
    main()
