"""One rollout as the rows that are trained: which tokens were sampled, which only read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import agl_fast
from agl_fast.printable import escaped
from agl_fast.quickstart.run_log import Played, rows_of
from agl_fast.rows.levels import Level, LevelName


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens of one kind.

    Attributes:
        trained: the model wrote them; otherwise it only reads them.
    """

    text: str
    trained: bool


def pieces_of(played: Played, tokenizer: Any, level: LevelName = "trajectory") -> list[list[Piece]]:
    """Its rows, each cut where trained and read tokens meet; a tree's branches are rows here."""
    rows = rows_of([agl_fast.Rollout("played", "played", played.calls, played.reward)], level)
    tensors = rows.tensors
    pieces = []
    for prompt, input_ids, mask, positions in zip(
        tensors["prompts"].unbind(),
        tensors["input_ids"].unbind(),
        tensors["response_mask"].unbind(),
        tensors["position_ids"].unbind(),
        strict=True,
    ):
        trained = [False] * len(prompt) + mask.bool().tolist()
        depths = positions.tolist()
        begins = [i for i, depth in enumerate(depths) if i == 0 or depth != depths[i - 1] + 1]
        tokens = list(zip(input_ids.tolist(), trained, strict=True))
        for begin, end in zip(begins, [*begins[1:], len(tokens)], strict=True):
            pieces.append(_runs(tokens[begin:end], tokenizer))
    return pieces


def marked(rows: list[list[Piece]], level: LevelName = "trajectory") -> str:
    """For a terminal: trained tokens stand between « and ».

    These two characters and control characters of the text itself are escaped, as is a line that
    would pass for the one between two rows.
    """
    between = f"--- another {'branch' if Level.of(level).is_tree else 'row'} ---"
    texts = ["".join(_marked(piece) for piece in row) for row in rows]
    texts = [re.sub(f"(?m)^{between}", f"\\\\{between}", text) for text in texts]
    return f"\n{between}\n".join(texts)


def _marked(piece: Piece) -> str:
    text = escaped(piece.text, also="«»")
    return f"«{text}»" if piece.trained else text


def _runs(ids: list[tuple[int, bool]], tokenizer: Any) -> list[Piece]:
    pieces: list[Piece] = []
    run: list[int] = []
    for place, (token, trained) in enumerate(ids):
        run.append(token)
        if place + 1 == len(ids) or ids[place + 1][1] != trained:
            pieces.append(Piece(tokenizer.decode(run), trained))
            run = []
    return pieces
