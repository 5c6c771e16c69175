"""Rows as plain data, their flat form packed by numpy, and their expansion in plain Python."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

FLAT_ROW = np.dtype(
    [
        ("first_token", "i8"),
        ("first_segment", "i8"),
        ("prompt_length", "i4"),
        ("response_length", "i4"),
        ("num_segments", "i4"),
        ("score", "f4"),
    ]
)
FLAT_SEGMENT = np.dtype([("end", "i4"), ("call", "i4"), ("first_log_prob", "i8")])


@dataclass
class PlainSegment:
    tokens: list[int]
    call: int  # -1: context
    log_probs: list[float] | None = None


@dataclass
class PlainRow:
    prompt: list[int]
    segments: list[PlainSegment]
    score: float = 0.0

    @property
    def response(self) -> list[int]:
        return [token for segment in self.segments for token in segment.tokens]


class PackedRows:
    """Stands in for ``_core.FlatRows``: the same buffer, packed independently."""

    def __init__(self, rows: list[PlainRow]) -> None:
        flat_rows, segments, log_probs, tokens = [], [], [], []
        for row in rows:
            response = row.response
            flat_rows.append(
                (
                    len(tokens),
                    len(segments),
                    len(row.prompt),
                    len(response),
                    len(row.segments),
                    row.score,
                )
            )
            tokens += row.prompt + response
            end = 0
            for segment in row.segments:
                end += len(segment.tokens)
                known = segment.log_probs is not None
                segments.append((end, segment.call, len(log_probs) if known else -1))
                log_probs += segment.log_probs or []
        self.counts = (len(flat_rows), len(segments), len(log_probs), len(tokens), 0)
        self.bytes = b"".join(
            np.array(part, dtype).tobytes()
            for part, dtype in (
                (flat_rows, FLAT_ROW),
                (segments, FLAT_SEGMENT),
                (log_probs, np.float32),
                (tokens, np.int32),
            )
        )
        self.nbytes = len(self.bytes)

    def write(self, buffer: int) -> None:
        ctypes.memmove(buffer, self.bytes, self.nbytes)


def plain_expand(
    rows: list[PlainRow], prompt_width: int, response_width: int, pad: int
) -> dict[str, list[list[Any]]]:
    """What the padded tensors must hold, straight from their definitions."""
    expanded = [_expand_row(row, prompt_width, response_width, pad) for row in rows]
    names = _expand_row(PlainRow([], []), prompt_width, response_width, pad)
    return {name: [row[name] for row in expanded] for name in names}


def _expand_row(row: PlainRow, prompt_width: int, response_width: int, pad: int) -> dict[str, list]:
    response = row.response
    before = prompt_width - len(row.prompt)
    after = response_width - len(response)
    prompts = [pad] * before + row.prompt
    responses = response + [pad] * after
    attention_mask = [0] * before + [1] * len(row.prompt + response) + [0] * after
    scores = [0.0] * response_width
    if response:
        scores[len(response) - 1] = row.score
    calls = [segment.call for segment in row.segments for _ in segment.tokens] + [-1] * after
    log_probs: list[float] = []
    for segment in row.segments:
        log_probs += segment.log_probs or [0.0] * len(segment.tokens)
    seen = np.cumsum(attention_mask, dtype=np.int64) - 1
    return {
        "prompts": prompts,
        "responses": responses,
        "input_ids": prompts + responses,
        "attention_mask": attention_mask,
        "position_ids": np.maximum(seen, 0).tolist(),
        "response_mask": [int(call >= 0) for call in calls],
        "call_index": calls,
        "token_level_scores": np.float32(scores).tolist(),
        "rollout_log_probs": np.float32(log_probs + [0.0] * after).tolist(),
    }
