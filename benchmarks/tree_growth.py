"""Prefix trees: what a gradient costs as a rollout grows: `python -m benchmarks.tree_growth`.

Of the first calls of one rollout a tree is built and learned from; the seconds of its attention are
taken out, as they grow with the paths, too. No rollout of the traces is long enough: where one
ends, another goes on from its last prompt.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AttentionInterface

import agl_fast
from agl_fast.tree.scores import TokenScores
from agl_fast.tree.segments import segment_attention
from benchmarks import report
from benchmarks.conversations import for_agl_fast, load_traces
from benchmarks.tree_update import (
    build,
    in_order_of_calls,
    log_probs,
    model_of,
    tree_tokens,
    weights_of,
)
from benchmarks.workload import (
    FULL,
    Answers,
    Competitor,
    Prepared,
    Size,
    resting_garbage_collector,
)

TRACE = "swe_think"
LARGEST_PART = 16_384  # tokens of a rollout's tree
ROUNDS = 2
TARGET = 1.3
SAME = {"atol": 1e-4, "rtol": 0}  # of log-probs
ATTENTION = "timed_tree_attention"


class Clock:
    """Seconds on the cores of this process."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        start = time.process_time()
        yield
        self.seconds += time.process_time() - start


class TimedAttention(torch.autograd.Function):
    """Attention run by run, forwards and backwards by the clock."""

    @staticmethod
    def forward(ctx: Any, clock: Clock, tree: Any, scaling: float, *given: Any) -> torch.Tensor:
        ctx.clock, ctx.given = clock, [each.detach().requires_grad_() for each in given]
        with clock.running(), torch.enable_grad():
            ctx.attended = segment_attention(*ctx.given, tree.runs, scaling)
        return ctx.attended.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with ctx.clock.running():
            gradients = torch.autograd.grad(ctx.attended, ctx.given, gradient)
        return None, None, None, *gradients


def attention_by(clock: Clock) -> Callable[..., tuple[torch.Tensor, None]]:
    """As a model of transformers takes it."""

    def attend(
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any, tree: Any, **_: Any
    ) -> tuple[torch.Tensor, None]:
        return TimedAttention.apply(clock, tree, scaling, query, key, value), None

    return attend


def long_rollout(n_calls: int) -> list[agl_fast.Call]:
    """Of the rollouts with the most calls, one after the other."""
    rollouts = for_agl_fast(load_traces(TRACE))
    parts = [each for each in rollouts if tree_tokens([each]) <= LARGEST_PART]
    calls: list[agl_fast.Call] = []
    for part in sorted(parts, key=lambda each: len(each.calls), reverse=True):
        before = calls[-1].prompt_ids if calls else []
        # Both begin with the same instructions.
        pairs = zip(before, part.calls[0].prompt_ids, strict=False)
        n_same = [*(a == b for a, b in pairs), False].index(False)
        calls += [
            agl_fast.Call(before + call.prompt_ids[n_same:], call.response_ids)
            for call in part.calls
        ]
        if len(calls) >= n_calls:
            break
    return calls[:n_calls]


def in_own_vocabulary(calls: list[agl_fast.Call]) -> tuple[list[agl_fast.Call], int]:
    """With ids from 0 to how many differ."""
    used = np.unique(np.concatenate([[*call.prompt_ids, *call.response_ids] for call in calls]))
    renamed = [
        agl_fast.Call(
            np.searchsorted(used, call.prompt_ids).tolist(),
            np.searchsorted(used, call.response_ids).tolist(),
        )
        for call in calls
    ]
    return renamed, len(used)


class Cost(NamedTuple):
    """Of one gradient; log-probs in the order in which they were sampled."""

    n_tokens: int
    seconds: float
    seconds_of_attention: float
    log_probs: torch.Tensor


def gradient(model: Any, scores: TokenScores, clock: Clock, calls: list[agl_fast.Call]) -> Cost:
    """From calls at hand to a gradient of all parameters."""
    model.zero_grad()
    total = Clock()
    clock.seconds = 0.0
    with total.running():
        batch = build([agl_fast.Rollout("long", "group", calls, 1.0)], "tree")
        found = log_probs(model, scores, batch, 0)
        trained = batch.tensors["response_mask"][0].bool()
        (found * weights_of(batch)[0, trained]).sum().backward()
    n_tokens = int(batch.tensors["attention_mask"].sum())
    in_order = in_order_of_calls(batch, found.detach())
    return Cost(n_tokens, total.seconds, clock.seconds, in_order)


def prepare(size: Size) -> Prepared:
    """A competitor for each number of calls."""
    calls, n_vocabulary = in_own_vocabulary(long_rollout(max(size.calls_of_growth)))
    clock = Clock()
    AttentionInterface.register(ATTENTION, attention_by(clock))
    model, of_rows = (model_of(n_vocabulary, size.layers_of_updates) for _ in range(2))
    model.set_attn_implementation(ATTENTION)
    scores, scores_of_rows = (TokenScores(each.lm_head, n_vocabulary) for each in (model, of_rows))

    def check(answers: Answers) -> None:
        """Log-probs of a call are those of the largest tree, and those of the call's own row."""
        largest = answers[str(len(calls))].log_probs
        for cost in answers.values():
            torch.testing.assert_close(cost.log_probs, largest[: len(cost.log_probs)], **SAME)
        row = build([agl_fast.Rollout("last", "group", calls[-1:], 1.0)], "transition")
        with torch.no_grad():
            expected = log_probs(of_rows, scores_of_rows, row, 0)
        torch.testing.assert_close(largest[-len(expected) :], expected, **SAME)

    return Prepared(
        {
            str(n_calls): Competitor(partial(gradient, model, scores, clock, calls[:n_calls]))
            for n_calls in size.calls_of_growth
        },
        check,
    )


def lines_of(costs: dict[str, list[Cost]]) -> list[report.Line]:
    """Each length by its best round, against the shortest, were that cost linear in tokens."""

    def best(name: str) -> tuple[int, float]:
        each = min(costs[name], key=lambda cost: cost.seconds - cost.seconds_of_attention)
        return each.n_tokens, 1000 * (each.seconds - each.seconds_of_attention)

    shortest, *longer = costs
    n_tokens, milliseconds = best(shortest)
    lines = []
    for name in longer:
        n, ours = best(name)
        linear = milliseconds * n / n_tokens
        work = f"gradient less attention, a tree token, {name} calls against {shortest}"
        lines.append(report.Line(work, linear, ours, ours / linear, TARGET, at_most=True))
    return lines


def measure(size: Size, rounds: int) -> list[report.Line]:
    prepared = prepare(size)
    costs: dict[str, list[Cost]] = {name: [] for name in prepared.competitors}
    with resting_garbage_collector():
        for _ in range(rounds):
            for name, competitor in prepared.competitors.items():
                cost = competitor.run()
                costs[name].append(cost)
                print(
                    f"{name} calls, {cost.n_tokens} tokens: {cost.seconds:.1f} s, of attention "
                    f"{cost.seconds_of_attention:.1f} s",
                    flush=True,
                )
    prepared.check({name: each[-1] for name, each in costs.items()})
    lines = lines_of(costs)
    measured = {
        name: [cost._replace(log_probs=None)._asdict() for cost in each]
        for name, each in costs.items()
    }
    report.write_measurement("tree_growth", lines, {"costs": measured})
    return lines


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(report.table(measure(FULL, ROUNDS)))
