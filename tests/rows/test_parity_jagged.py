"""The jagged layout and `trim` against the padded batch and verl's own conversion of it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import agl_fast
from benchmarks.baselines import verl_no_padding
from benchmarks.conversations import for_agl_fast, load_traces

PAD = 0
P, R = 4, 7
PER_ROW = {"is_drop_mask"}
OVER_ALL_TOKENS = {"input_ids", "position_ids"}
OVER_RESPONSES = {"responses", "response_mask", "token_level_scores", "call_index"}

token_ids = st.integers(0, 2)  # few, so that prompts extend one another; the pad id among them


@st.composite
def branching_rollouts(draw) -> list[agl_fast.Rollout]:
    """Calls that extend, repeat, overflow and share nothing; some with log-probs."""
    rollouts = []
    for i in range(draw(st.integers(1, 4))):
        contexts: list[list[int]] = [[]]
        calls = []
        for _ in range(draw(st.integers(1, 5))):
            before = draw(st.sampled_from(contexts))
            prompt = before + draw(st.lists(token_ids, min_size=1, max_size=6))
            response = draw(st.lists(token_ids, min_size=1, max_size=5))
            log_probs = [-0.25 * k for k in range(len(response))] if draw(st.booleans()) else None
            calls.append(agl_fast.Call(prompt, response, log_probs))
            contexts.append(prompt + response)
        rollouts.append(
            agl_fast.Rollout(
                rollout_id=f"rollout-{i}",
                data_id=f"sample-{i % 2}",
                calls=calls,
                reward=draw(st.floats(-1, 1, width=32)),
            )
        )
    return rollouts


def build(rollouts, *, prompt_width=P, response_width=R, **options) -> agl_fast.Batch:
    return agl_fast.build_batch(
        rollouts,
        max_prompt_length=prompt_width,
        max_response_length=response_width,
        pad_token_id=PAD,
        call_index=True,
        **options,
    )


def assert_jagged_equals_padded(padded: agl_fast.Batch, jagged: agl_fast.Batch) -> None:
    dense, nested = padded.tensors, jagged.tensors
    assert set(nested) == set(dense) - {"attention_mask"}

    from_verl = verl_no_padding(dense)
    for name in OVER_ALL_TOKENS:
        assert_same_nested(nested[name], from_verl[name])

    width = dense["prompts"].shape[1]
    attention = dense["attention_mask"].bool()
    is_prompt, is_response = attention[:, :width], attention[:, width:]
    assert_values_under_mask(nested["prompts"], dense["prompts"], is_prompt)
    for name in set(nested) - PER_ROW - OVER_ALL_TOKENS - {"prompts"}:
        assert_values_under_mask(nested[name], dense[name], is_response)
    for name in PER_ROW:
        assert torch.equal(nested[name], dense[name])
    for name, column in padded.columns.items():
        assert jagged.columns[name].tolist() == column.tolist()


def assert_same_nested(mine: torch.Tensor, expected: torch.Tensor) -> None:
    assert mine.is_nested
    assert mine.layout == torch.jagged
    assert mine.dtype == expected.dtype
    assert torch.equal(mine.values(), expected.values())
    assert mine.offsets().tolist() == expected.offsets().tolist()


def assert_values_under_mask(mine: torch.Tensor, dense: torch.Tensor, mask: torch.Tensor) -> None:
    assert mine.is_nested
    assert mine.dtype == dense.dtype
    assert torch.equal(mine.values(), dense[mask])
    assert mine.offsets().diff().tolist() == mask.sum(-1).tolist()


@settings(max_examples=100, deadline=None)
@given(branching_rollouts(), st.sampled_from(["transition", "trajectory", "tree"]))
def test_jagged_equals_padded_as_verl_converts_it(rollouts, level):
    padded = build(rollouts, level=level)
    jagged = build(rollouts, level=level, layout="jagged")
    assert_jagged_equals_padded(padded, jagged)


@settings(max_examples=50, deadline=None)
@given(branching_rollouts())
def test_one_offsets_tensor_per_family(rollouts):
    """verl and torch tell nested tensors of one shape by the identity of their offsets."""
    tensors = build(rollouts, layout="jagged").tensors
    for family in (OVER_ALL_TOKENS, OVER_RESPONSES | (set(tensors) & {"rollout_log_probs"})):
        first, *others = (tensors[name].offsets() for name in sorted(family))
        assert all(offsets is first for offsets in others)


@settings(max_examples=100, deadline=None)
@given(branching_rollouts(), st.sampled_from(["transition", "trajectory"]))
def test_trim_cuts_to_the_longest_prompt_and_response(rollouts, level):
    whole = build(rollouts, level=level).tensors
    trimmed = build(rollouts, level=level, trim=True).tensors
    attention = whole["attention_mask"]
    prompt_width = int(attention[:, :P].sum(-1).max())
    response_width = int(attention[:, P:].sum(-1).max())
    response = slice(0, response_width)
    both = slice(P - prompt_width, P + response_width)
    assert set(trimmed) == set(whole)
    for name, tensor in whole.items():
        if name in PER_ROW:
            expected = tensor
        elif name == "prompts":
            expected = tensor[:, P - prompt_width :]
        elif tensor.shape[1] == P + R:
            expected = tensor[:, both]
        else:
            expected = tensor[:, response]
        assert torch.equal(trimmed[name], expected), name


@pytest.mark.parametrize("level", ["trajectory", "tree"])
@pytest.mark.parametrize("name", ["swe_plain", "swe_nothink", "swe_think"])
def test_jagged_equals_padded_on_real_traces(name, level):
    rollouts = for_agl_fast(load_traces(name))
    widths = {"prompt_width": 2048, "response_width": 8192, "level": level}
    padded = build(rollouts, **widths)
    jagged = build(rollouts, layout="jagged", **widths)
    assert_jagged_equals_padded(padded, jagged)
