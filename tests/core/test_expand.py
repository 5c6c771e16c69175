"""The device kernels' functors, run on the host over the arrays that a device gets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agl_fast.ops.fill import expand
from agl_fast.ops.pad import pad_ragged
from support.flat_rows import PackedRows, PlainRow, PlainSegment, plain_expand

CPU = torch.device("cpu")
SCORES = st.floats(width=32, allow_nan=False, allow_infinity=False)
FLOATS = ("token_level_scores", "rollout_log_probs")


def assert_expands(rows, prompt_width, response_width, pad=0, *, call_index=True, log_probs=True):
    expected = plain_expand(rows, prompt_width, response_width, pad)
    if not call_index:
        del expected["call_index"]
    if not log_probs:
        del expected["rollout_log_probs"]
    tensors = unwritten(expected, len(rows), prompt_width, response_width)
    expand(PackedRows(rows), prompt_width, response_width, pad, outputs=tensors)
    for name, values in expected.items():
        assert tensors[name].tolist() == values, name


def unwritten(names, rows, prompt_width, response_width):
    """Tensors of the right shapes that hold what no row does."""
    widths = dict.fromkeys(names, response_width) | {
        "prompts": prompt_width,
        "input_ids": prompt_width + response_width,
        "attention_mask": prompt_width + response_width,
        "position_ids": prompt_width + response_width,
    }
    return {
        name: torch.full(
            (rows, width),
            -77,
            dtype=torch.float32 if name in FLOATS else torch.int64,
        )
        for name, width in widths.items()
    }


def row_of(prompt_length, *segments, score=1.5):
    """A row from its segments' (length, call, has log-probs); all tokens and log-probs differ."""
    token = 100 + prompt_length
    parts = []
    for length, call, known in segments:
        tokens = list(range(token, token + length))
        parts.append(PlainSegment(tokens, call, [-t / 1024 for t in tokens] if known else None))
        token += length
    return PlainRow(list(range(100, 100 + prompt_length)), parts, score)


@st.composite
def row_tables(draw):
    prompt_width = draw(st.integers(0, 9))
    response_width = draw(st.integers(0, 12))
    rows = []
    for _ in range(draw(st.integers(0, 6))):
        prompt_length = draw(st.integers(0, prompt_width))
        left = draw(st.integers(0, response_width))
        segments = []
        while left:
            length = draw(st.integers(1, left))
            segments.append((length, draw(st.integers(-1, 3)), draw(st.booleans())))
            left -= length
        rows.append(row_of(prompt_length, *segments, score=draw(SCORES)))
    return rows, prompt_width, response_width


@given(row_tables(), st.integers(0, 2**40), st.booleans(), st.booleans())
def test_expands_like_the_definitions(table, pad, call_index, log_probs):
    rows, prompt_width, response_width = table
    assert_expands(
        rows, prompt_width, response_width, pad, call_index=call_index, log_probs=log_probs
    )


@pytest.mark.parametrize("prompt_width", [3, 4, 5])
@pytest.mark.parametrize("response_width", [6, 7])
def test_odd_widths_split_pairs_at_borders_and_row_starts(prompt_width, response_width):
    rows = [row_of(3, (2, 0, True), (1, -1, False), (3, 4, True)) for _ in range(4)]
    assert_expands(rows, prompt_width, response_width, 9)


@pytest.mark.parametrize(
    ("prompt_width", "response_width"), [(1, 1), (1, 2), (2, 1), (1, 0), (0, 1)]
)
def test_narrow_widths(prompt_width, response_width):
    rows = [
        row_of(prompt_width, *([(response_width, 0, True)] if response_width else [])),
        row_of(0),
        row_of(prompt_width),
    ]
    assert_expands(rows, prompt_width, response_width, 7)


def test_a_row_without_segments_has_a_prompt_only():
    assert_expands([row_of(2)], 4, 6, 1)


def test_an_empty_row_has_position_zero_everywhere():
    assert_expands([row_of(0)], 3, 5, 1)


def test_no_rows_write_nothing():
    assert_expands([], 3, 5)


def test_zero_widths_give_empty_tensors():
    assert_expands([row_of(0), row_of(0)], 0, 0)


def test_every_segment_of_many_is_found():
    segments = [(1 + index % 3, index if index % 4 else -1, index % 5 > 0) for index in range(1000)]
    length = sum(segment[0] for segment in segments)
    assert_expands([row_of(3, *segments), row_of(2, (1, 0, True))], 5, length + 2)


def test_log_probs_of_some_segments_are_unknown():
    assert_expands([row_of(1, (3, 0, False), (2, -1, False), (2, 1, True))], 1, 8)


def test_a_row_longer_than_the_grid_is_wide():
    # 64 column blocks of 512 columns; the threads go round once more past them.
    rows = [
        row_of(19_001, (15_000, 0, True), (3, -1, False), (900, 1, True)),
        row_of(5, (1, 0, False)),
    ]
    assert_expands(rows, 19_003, 15_905)


def test_more_rows_than_the_grid_has_blocks():
    rows = [row_of(index % 2, (1, index, True), score=index / 4) for index in range(65_540)]
    assert_expands(rows, 1, 2, 9)


def plain_pad(sequences, width, pad, *, left):
    ids, mask = [], []
    for sequence in sequences:
        kept = (sequence[-width:] if left else sequence[:width]) if width else []
        gap = width - len(kept)
        ids.append([pad] * gap + kept if left else kept + [pad] * gap)
        mask.append([0] * gap + [1] * len(kept) if left else [1] * len(kept) + [0] * gap)
    return ids, mask


def ragged(sequences):
    lengths = [0, *map(len, sequences)]
    values = torch.tensor([token for one in sequences for token in one], dtype=torch.int32)
    return values, torch.tensor(lengths).cumsum(0)


@given(
    st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=9), max_size=6),
    st.integers(0, 12),
    st.integers(0, 2**40),
    st.booleans(),
)
def test_pads_ragged_ids(sequences, width, pad, left):
    ids, mask = pad_ragged(*ragged(sequences), width, pad, left=left, device=CPU)
    assert ids.dtype == mask.dtype == torch.int64
    assert ids.shape == mask.shape == (len(sequences), width)
    assert (ids.tolist(), mask.tolist()) == plain_pad(sequences, width, pad, left=left)


@pytest.mark.parametrize("left", [True, False])
def test_pads_wider_than_the_grid(left):
    sequences = [list(range(40_001)), [], [5], list(range(7, 32_777))]
    ids, mask = pad_ragged(*ragged(sequences), 35_001, 3, left=left, device=CPU)
    assert (ids.tolist(), mask.tolist()) == plain_pad(sequences, 35_001, 3, left=left)
