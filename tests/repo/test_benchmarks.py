"""The benchmarks at a tiny size: every competitor runs, every answer is checked."""

import pytest
import torch

from benchmarks import report
from benchmarks.workload import TINY, limited_threads, time_interleaved
from benchmarks.workloads import WORKLOADS


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_competitors_agree(workload):
    if workload.needs_cuda and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    prepared = workload.prepare(TINY)
    with limited_threads(workload.threads):
        times = time_interleaved(prepared, rounds=1)
    for row in workload.rows:
        assert report.line_of(row, times.seconds).ratio > 0


def test_the_table_shows_what_was_reached():
    text = report.table(
        [
            report.Line("faster", 100.0, 2.0, 50.0, 20),
            report.Line("slower", 100.0, 50.0, 2.0, 20),
            report.Line("bounded", 1.0, 1.1, 1.1, 1.2, at_most=True),
        ]
    )
    assert [line.split(" | ")[-2:] for line in text.splitlines()[2:]] == [
        ["20×", "yes |"],
        ["20×", "**no** |"],
        ["≤ 1.2", "yes |"],
    ]
