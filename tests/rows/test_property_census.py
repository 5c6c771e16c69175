"""The simulated agents really do what the other property tests are meant to meet."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings

from agl_fast import reference
from agl_fast.reference.chains import shared_prefix
from agl_fast.rows.accounting import DROP_REASONS, MISMATCH_KINDS, EmptyBatchError
from support.plain_rollouts import PlainCall, PlainRollout
from support.simulated_agents import CHAINS, options, several_rollouts

N_EXAMPLES = 1000
ENOUGH = 5
CONVERSATIONS = [
    "continued",
    "continued twice",
    "continued exactly",
    "answers the same prompt again",
    "branches",
    "interleaved",
    "several contexts fit",
    "equal contexts fit",
]
BATCHES = [
    *MISMATCH_KINDS,
    *DROP_REASONS,
    "truncated",
    "duplicate",
    "empty call",
    "empty row",
    "no row",
    "spilled",
    "missing reward",
    "log-probs in some rows",
    "marked and unmarked rows",
]
TREES = [
    "several roots",
    "a prompt stops inside an answer",
    "a prompt repeats one of two equal answers",
    "several rows of a rollout",
]


@pytest.fixture(scope="module")
def census() -> Counter[str]:
    """How many of the examples, the same ones every time, show each case."""
    # In a process of its own: Hypothesis draws constants of all modules that are loaded, so that
    # the examples would depend on which tests ran before.
    counted = subprocess.run(
        [sys.executable, __file__],
        check=True,
        capture_output=True,
        text=True,
    )
    return Counter(json.loads(counted.stdout))


def count_cases() -> Counter[str]:
    seen: Counter[str] = Counter()

    @settings(max_examples=N_EXAMPLES, derandomize=True, database=None, deadline=None)
    @given(several_rollouts(positions=True), options(CHAINS))
    def count(rollouts: list[PlainRollout], chosen: dict[str, Any]) -> None:
        seen.update(conversations_in(rollouts))
        seen.update(cases_in(rollouts, chosen) | trees_in(rollouts, chosen))

    count()
    return seen


@pytest.mark.parametrize("case", CONVERSATIONS + BATCHES + TREES)
def test_occurs_in_the_generated_data(census: Counter[str], case: str) -> None:
    assert census[case] >= ENOUGH, census


def conversations_in(rollouts: list[PlainRollout]) -> set[str]:
    """What happens before any limit cuts a row."""
    try:
        batch = reference.build_batch(
            rollouts,
            max_prompt_length=10_000,
            max_response_length=10_000,
            pad_token_id=0,
            layout="jagged",
            call_index=True,
        )
    except EmptyBatchError:
        return set()
    found: set[str] = set()
    for rollout in rollouts:
        rows = [
            index
            for index, rollout_id in enumerate(batch.columns["rollout_id_list"])
            if rollout_id == rollout.rollout_id
        ]
        chains = [list(dict.fromkeys(batch.tensors["call_index"][row])) for row in rows]
        chains = [[call for call in chain if call != -1] for chain in chains]
        prompts = [batch.tensors["prompts"][row] for row in rows]
        n_calls = max((len(chain) for chain in chains), default=0)
        found |= {"continued"} if n_calls > 1 else set()
        found |= {"continued twice"} if n_calls > 2 else set()
        for row in rows:
            sampled_by = batch.tensors["call_index"][row]
            if any(-1 != a != b != -1 for a, b in pairwise(sampled_by)):
                found.add("continued exactly")
        if len(set(map(tuple, prompts))) < len(prompts):
            found.add("answers the same prompt again")
        if any(_interleave(a, b) for a in chains for b in chains):
            found.add("interleaved")
        if any(m.rollout_id == rollout.rollout_id and m.index > 0 for m in batch.mismatches):
            found.add("branches")
        found |= _choices_between_contexts(rollout.calls, chains)
    return found


def _interleave(a: list[int], b: list[int]) -> bool:
    return any(first < call < second for call in b for first, second in pairwise(a))


def _choices_between_contexts(calls: list[PlainCall], chains: list[list[int]]) -> set[str]:
    found = set()
    for chain in chains:
        for index in chain[1:]:
            prompt = calls[index].prompt_ids
            open_contexts = [
                calls[max(call for call in other if call < index)].context
                for other in chains
                if other[0] < index
            ]
            fitting = [ids for ids in open_contexts if prompt[: len(ids)] == ids]
            if len({len(ids) for ids in fitting}) > 1:
                found.add("several contexts fit")
            if len(set(map(tuple, fitting))) < len(fitting):
                found.add("equal contexts fit")
    return found


def trees_in(rollouts: list[PlainRollout], chosen: dict[str, Any]) -> set[str]:
    try:
        batch = reference.build_batch(
            rollouts, **(chosen | {"level": "tree", "layout": "jagged", "call_index": True})
        )
    except EmptyBatchError:
        return set()
    found = {reason for reason, n in batch.accounting.dropped_by_reason.items() if n}
    if any(positions.count(0) > 1 for positions in batch.tensors["position_ids"]):
        found.add("several roots")
    if any(entry.n_rows > 1 for entry in batch.rollouts):
        found.add("several rows of a rollout")
    for rollout in rollouts:
        for call in rollout.calls:
            answers = [
                earlier.context
                for earlier in rollout.calls[: rollout.calls.index(call)]
                if len(earlier.prompt_ids) < shared_prefix(earlier.context, call.prompt_ids)
            ]
            shared = [shared_prefix(context, call.prompt_ids) for context in answers]
            if any(n < len(context) for n, context in zip(shared, answers, strict=True)):
                found.add("a prompt stops inside an answer")
            repeated = [tuple(each[:n]) for n, each in zip(shared, answers, strict=True)]
            if len(set(repeated)) < len(repeated):
                found.add("a prompt repeats one of two equal answers")
    return found


def cases_in(rollouts: list[PlainRollout], chosen: dict[str, Any]) -> set[str]:
    found: set[str] = set()
    try:
        batch = reference.build_batch(rollouts, **chosen)
    except EmptyBatchError as error:
        found.add("no row")
        accounting = error.accounting
    else:
        accounting = batch.accounting
        found |= {mismatch.kind for mismatch in batch.mismatches}
        if any(mask[0] == 0 for mask in batch.tensors["response_mask"]):
            found.add("spilled")
        if not all(entry.has_reward for entry in batch.rollouts):
            found.add("missing reward")
        if len(set(batch.columns["has_rollout_log_probs"])) == 2:
            found.add("log-probs in some rows")
        if len(set(batch.tensors["is_drop_mask"])) == 2:
            found.add("marked and unmarked rows")
    found |= {reason for reason, count in accounting.dropped_by_reason.items() if count}
    found |= {"truncated"} if accounting.truncated else set()
    found |= {"duplicate"} if accounting.duplicate else set()
    found |= {"empty call"} if accounting.empty_calls else set()
    found |= {"empty row"} if accounting.empty_rows else set()
    return found


if __name__ == "__main__":
    print(json.dumps(count_cases()))
