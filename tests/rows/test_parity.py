"""Bit-equal to Agent-lightning 0.3.0's own batches where no deliberate difference applies.

`test_parity_differences.py` names the differences; the inputs here avoid them.
"""

from itertools import accumulate

import pytest
import torch
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

pytest.importorskip("agentlightning", reason="needs the extra [cpu] or [verl]")

import agl_fast
from benchmarks.agentlightning_daemon import Daemon, columns_of, tensors_of
from benchmarks.conversations import (
    Conversation,
    for_agentlightning,
    for_agl_fast,
    load_traces,
)

PAD = 0
SHARED_METRICS = {
    "training/reward",
    "training/n_rollouts",
    "training/n_rollouts_w_trace",
    "training/n_rollouts_w_reward",
    "training/n_truncated_triplets",
    "training/n_triplets",
}
TRAJECTORY_METRICS = SHARED_METRICS | {
    "training/n_unmerged_rollouts",
    "training/n_triplets_by_turn",
    "training/avg_response_length_by_turn",
    "training/max_response_length_by_turn",
    "training/min_response_length_by_turn",
}
OURS_ALONE = {
    "transition": {"response_mask"},
    "trajectory": set(),
}

token_ids = st.integers(0, 5)  # the pad id among them
tokens = st.lists(token_ids, min_size=1, max_size=5)
rewards = st.none() | st.floats(-1e6, 1e6, width=32)


def assert_same_batch(
    conversations: list[Conversation], *, level: str, prompt_width: int, response_width: int
) -> None:
    daemon = Daemon(for_agentlightning(conversations), level=level, pad_token_id=PAD)
    theirs, their_metrics = daemon.get_train_data_batch(prompt_width, response_width)
    ours = agl_fast.build_batch(
        for_agl_fast(conversations),
        level=level,
        max_prompt_length=prompt_width,
        max_response_length=response_width,
        pad_token_id=PAD,
        overlong_prompt="drop",
        trim=False,
        layout="padded",
    )

    expected = tensors_of(theirs)
    assert set(ours.tensors) - set(expected) == OURS_ALONE[level]
    for name, tensor in expected.items():
        mine = ours.tensors[name]
        if name == "token_level_scores":
            mine = mine.to(torch.bfloat16)
        assert mine.dtype == tensor.dtype, name
        assert torch.equal(mine, tensor), name
    for name, column in columns_of(theirs).items():
        assert ours.columns[name].tolist() == column.tolist(), name
    shared = TRAJECTORY_METRICS if level == "trajectory" else SHARED_METRICS
    assert set(their_metrics) == shared
    for name, value in their_metrics.items():
        assert ours.metrics[name] == pytest.approx(value, rel=1e-12, abs=1e-12), name


def conversations_of(all_calls: list, all_rewards: list) -> list[Conversation]:
    return [
        Conversation(f"rollout-{i}", f"sample-{i % 2}", calls, reward)
        for i, (calls, reward) in enumerate(zip(all_calls, all_rewards, strict=True))
    ]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.tuples(tokens, tokens), max_size=4), min_size=1, max_size=4).filter(any),
    st.lists(rewards, min_size=4, max_size=4),
    st.integers(1, 6),
    st.integers(1, 6),
)
def test_transitions(all_calls, all_rewards, prompt_width, response_width):
    assert_same_batch(
        conversations_of(all_calls, all_rewards[: len(all_calls)]),
        level="transition",
        prompt_width=prompt_width,
        response_width=response_width,
    )


@st.composite
def sequential_rollouts(draw):
    """Rollouts whose calls extend the call before or open a conversation that shares nothing.

    Only a rollout's first prompt may be longer than the prompt width, and no row may end in what a
    tool or a user added: those are deliberate differences.
    """
    prompt_width = draw(st.integers(1, 6))
    all_calls, masks = [], []
    for _ in range(draw(st.integers(1, 4))):
        calls: list[tuple[list[int], list[int]]] = []
        for turn in range(draw(st.integers(0, 5))):
            response = draw(tokens)
            if calls and draw(st.booleans()):
                added = draw(tokens)
                calls.append((calls[-1][0] + calls[-1][1] + added, response))
                masks[-1] += [0] * len(added) + [1] * len(response)
            else:
                longest = 8 if turn == 0 else prompt_width
                rest = draw(st.lists(token_ids, max_size=longest - 1))
                calls.append(([100 + turn, *rest], response))
                masks.append([1] * len(response))
        all_calls.append(calls)
    if not any(all_calls):
        all_calls[0] = [([100], draw(tokens))]
        masks.append([1] * len(all_calls[0][0][1]))
    widths = [
        width
        for width in range(1, max(map(len, masks)) + 3)
        if all(mask[min(width, len(mask)) - 1] for mask in masks)
    ]
    all_rewards = [draw(rewards) for _ in all_calls]
    return conversations_of(all_calls, all_rewards), prompt_width, draw(st.sampled_from(widths))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sequential_rollouts())
def test_trajectories(case):
    conversations, prompt_width, response_width = case
    assert_same_batch(
        conversations,
        level="trajectory",
        prompt_width=prompt_width,
        response_width=response_width,
    )


@pytest.mark.parametrize("name", ["swe_plain", "swe_nothink", "swe_think"])
class TestRealTraces:
    def test_transitions_cut_to_their_limits(self, name):
        assert_same_batch(
            load_traces(name), level="transition", prompt_width=4096, response_width=100
        )

    def test_trajectories_of_every_length(self, name):
        conversations = load_traces(name)
        longest = max(len(p) + len(r) for one in conversations for p, r in one.calls)
        assert_same_batch(
            conversations, level="trajectory", prompt_width=longest, response_width=longest
        )

    def test_first_prompts_that_are_too_long(self, name):
        """One row a rollout, so that only first prompts can be too long."""
        conversations = [one._replace(calls=one.calls[:1]) for one in load_traces(name)]
        lengths = sorted(len(one.calls[0][0]) for one in conversations)
        assert_same_batch(
            conversations,
            level="trajectory",
            prompt_width=lengths[len(lengths) // 2],
            response_width=64,
        )


def test_many_short_rollouts():
    """Enough rows that the work is split among threads."""
    ids = list(accumulate(range(1000), lambda a, b: (a * 31 + b) % 1009))
    conversations = [
        Conversation(
            f"rollout-{i}",
            f"sample-{i // 4}",
            [(ids[i : i + 20 + i % 7], ids[i : i + 30]), (ids[i : i + 5], ids[i : i + 1 + i % 5])],
            i / 7,
        )
        for i in range(500)
    ]
    for level in ("transition", "trajectory"):
        assert_same_batch(conversations, level=level, prompt_width=24, response_width=28)


def has_merged_call(case) -> bool:
    return any(
        later[0][: len(before[0])] == before[0]
        for one in case[0]
        for before, later in zip(one.calls, one.calls[1:], strict=False)
    )


def has_new_conversation(case) -> bool:
    return any(len(one.calls) > 1 for one in case[0]) and not has_merged_call(case)


def has_overlong_first_prompt(case) -> bool:
    return any(len(one.calls[0][0]) > case[1] for one in case[0] if one.calls)


def has_truncated_response(case) -> bool:
    return any(len(response) > case[2] for one in case[0] for _, response in one.calls)


def has_rollout_without_calls(case) -> bool:
    return any(not one.calls for one in case[0])


@pytest.mark.parametrize(
    "holds",
    [
        has_merged_call,
        has_new_conversation,
        has_overlong_first_prompt,
        has_truncated_response,
        has_rollout_without_calls,
    ],
)
def test_the_trajectories_compared_cover(holds):
    find(sequential_rollouts(), holds)
