"""What a benchmark is: competitors at the same work, the check of their answers, its table rows."""

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

Answers = Mapping[str, Any]


class Competitor(NamedTuple):
    """`run` is timed; `setup`, before each run, is not."""

    run: Callable[[], Any]
    setup: Callable[[], None] = lambda: None


class Prepared(NamedTuple):
    """Competitors by name over one input; `check` raises where an answer is wrong."""

    competitors: dict[str, Competitor]
    check: Callable[[Answers], None]


class Row(NamedTuple):
    """A line of the table: how many times faster `ours` must be than `baseline`.

    With `at_most`, `target` bounds the time of `ours` over that of `baseline` instead.
    """

    work: str
    baseline: str
    ours: str
    target: float | None
    at_most: bool = False


@dataclass(frozen=True)
class Size:
    """How large the inputs are: the issue's sizes for measuring, tiny ones for the tests."""

    padded_lists: int
    padded_width: int
    rollouts: int
    calls: int
    prompt_width: int
    response_width: int
    long_response_width: int
    grown_length: int
    parsed_ids: int
    traces: tuple[str, ...]
    rollouts_of_traces: int
    tree_tokens_of_updates: int
    rollouts_of_updates: int
    calls_of_updates: int
    layers_of_updates: int
    calls_of_growth: tuple[int, ...]


FULL = Size(
    padded_lists=1024,
    padded_width=4096,
    rollouts=256,
    calls=10,
    prompt_width=4096,
    response_width=2048,
    long_response_width=34384,
    grown_length=16384,
    parsed_ids=8192,
    traces=("swe_plain", "swe_think"),
    rollouts_of_traces=44,
    tree_tokens_of_updates=6000,
    rollouts_of_updates=1,
    calls_of_updates=1000,
    layers_of_updates=4,
    calls_of_growth=(8, 16, 32),
)
TINY = Size(
    padded_lists=5,
    padded_width=17,
    rollouts=3,
    calls=4,
    prompt_width=24,
    response_width=16,
    long_response_width=211,
    grown_length=160,
    parsed_ids=33,
    traces=("swe_think",),
    rollouts_of_traces=2,
    tree_tokens_of_updates=2100,
    rollouts_of_updates=1,
    calls_of_updates=2,
    layers_of_updates=1,
    calls_of_growth=(1, 2),
)


@dataclass(frozen=True)
class Workload:
    """Competitors that run interleaved, and the rows that compare two of them each."""

    name: str
    prepare: Callable[[Size], Prepared]
    rows: tuple[Row, ...]
    rounds: int
    threads: int | None = None  # None: what agl_fast and torch choose
    needs_cuda: bool = False


@contextmanager
def limited_threads(threads: int | None) -> Iterator[None]:
    """agl_fast on so many threads."""
    before = os.environ.get("AGL_NUM_THREADS")
    if threads is not None:
        os.environ["AGL_NUM_THREADS"] = str(threads)
    try:
        yield
    finally:
        if threads is not None:
            del os.environ["AGL_NUM_THREADS"]
            if before is not None:
                os.environ["AGL_NUM_THREADS"] = before


def answers_of(prepared: Prepared) -> dict[str, Any]:
    """One run of every competitor, its answer checked."""
    answers = {}
    for name, competitor in prepared.competitors.items():
        competitor.setup()
        answers[name] = competitor.run()
    prepared.check(answers)
    return answers


class Times(NamedTuple):
    """Seconds of each competitor in each round: on the clock, and on the cores (all threads)."""

    seconds: dict[str, list[float]]
    cpu_seconds: dict[str, list[float]]


def time_interleaved(prepared: Prepared, rounds: int) -> Times:
    """Time all competitors in every round, in turn.

    A round whose answers are checked comes before, to warm up, and one after, to see that repeated
    runs change no answer. The garbage collector rests meanwhile.
    """
    answers_of(prepared)
    times = Times(*({name: [] for name in prepared.competitors} for _ in Times._fields))
    with resting_garbage_collector():
        for _ in range(rounds):
            for name, competitor in prepared.competitors.items():
                competitor.setup()
                start, cpu_start = time.perf_counter(), time.process_time()
                answer = competitor.run()
                times.seconds[name].append(time.perf_counter() - start)
                times.cpu_seconds[name].append(time.process_time() - cpu_start)
                del answer
    answers_of(prepared)
    return times


@contextmanager
def resting_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
