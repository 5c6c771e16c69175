"""Measurements become lines of the table and files."""

import datetime
import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from benchmarks.workload import Row

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Line:
    """A line of the table; times in milliseconds, None where there are none."""

    work: str
    baseline_ms: float | None
    ours_ms: float | None
    ratio: float
    target: float | None
    at_most: bool = False

    @property
    def reached(self) -> bool | None:
        if self.target is None:
            return None
        return self.ratio <= self.target if self.at_most else self.ratio >= self.target


def line_of(row: Row, seconds: dict[str, list[float]]) -> Line:
    """The row's two competitors by their best rounds."""
    baseline, ours = (1000 * min(seconds[name]) for name in (row.baseline, row.ours))
    ratio = ours / baseline if row.at_most else baseline / ours
    return Line(row.work, baseline, ours, ratio, row.target, row.at_most)


def environment() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "agl_fast_threads": os.environ.get("AGL_NUM_THREADS", "one per core, at most 8"),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def write_measurement(name: str, lines: Iterable[Line], measured: dict[str, Any]) -> None:
    """`results/<name>.json`: the lines, every round's seconds, and where they were measured."""
    result = {
        "environment": environment(),
        "lines": [{**asdict(line), "reached": line.reached} for line in lines],
        **measured,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def table(lines: Iterable[Line]) -> str:
    """Markdown."""
    head = (
        "| work | baseline ms | agl_fast ms | ratio | must reach | reached |\n"
        "| --- | ---: | ---: | ---: | ---: | --- |\n"
    )
    return head + "".join(_table_line(line) for line in lines)


def _table_line(line: Line) -> str:
    unit = "" if line.at_most else "×"
    target = "" if line.target is None else f"{'≤ ' if line.at_most else ''}{line.target:g}{unit}"
    reached = {True: "yes", False: "**no**", None: ""}[line.reached]
    cells = (
        line.work,
        _milliseconds(line.baseline_ms),
        _milliseconds(line.ours_ms),
        f"{line.ratio:.3g}{unit}",
        target,
        reached,
    )
    return f"| {' | '.join(cells)} |\n"


def _milliseconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if value < 1 else f"{value:.1f}"


def write_table(lines: Iterable[Line], notes: Iterable[str]) -> str:
    """`results/table.md`, and its text."""
    where = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in environment().items())
    explained = (
        "Best round of each; all competitors of a benchmark run in every round, in one process, "
        "with the garbage collector off. A benchmark whose answers differ fails."
    )
    text = "\n".join([table(lines), explained, *notes, f"Measured with: {where}.", ""])
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "table.md").write_text(text)
    return text
