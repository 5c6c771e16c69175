"""The same workloads under pytest-benchmark: `pytest benchmarks`, a group per workload.

The ratios that count are those of one interleaved run, in the table of `python -m benchmarks`.
"""

import pytest
import torch

from benchmarks.workload import FULL, answers_of, limited_threads
from benchmarks.workloads import WORKLOADS


@pytest.fixture(scope="module")
def prepared(request):
    workload = request.param
    if workload.needs_cuda and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with limited_threads(workload.threads):
        inputs = workload.prepare(FULL)
        answers_of(inputs)
        yield inputs


@pytest.mark.parametrize(
    ("prepared", "competitor", "group", "rounds"),
    [
        pytest.param(workload, name, workload.name, workload.rounds, id=f"{workload.name}-{name}")
        for workload in WORKLOADS
        for name in sorted({name for row in workload.rows for name in (row.baseline, row.ours)})
    ],
    indirect=["prepared"],
)
def test_workload(benchmark, prepared, competitor, group, rounds):
    benchmark.group = group
    run, setup = prepared.competitors[competitor]
    benchmark.pedantic(run, setup=setup, rounds=rounds)
