"""One rollout as the rows that are trained: which tokens were sampled, which only read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import agl_fast
from agl_fast.quickstart.run_log import Played


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens of one kind.

    Attributes:
        trained: the model wrote them; otherwise it only reads them.
    """

    text: str
    trained: bool


def pieces_of(played: Played, tokenizer: Any) -> list[list[Piece]]:
    """Its rows at level trajectory, each cut where trained and read tokens meet."""
    longest = 1 + max(len(call.prompt_ids) + len(call.response_ids) for call in played.calls)
    batch = agl_fast.build_batch(
        [agl_fast.Rollout("played", "played", played.calls, played.reward)],
        level="trajectory",
        max_prompt_length=longest,
        max_response_length=longest,
        pad_token_id=0,
    )
    tensors = batch.tensors
    width = tensors["prompts"].shape[1]
    rows = []
    for row in range(len(batch)):
        ids: list[tuple[int, bool]] = []
        mask = tensors["response_mask"][row].tolist()
        for place, (token, is_there) in enumerate(
            zip(
                tensors["input_ids"][row].tolist(),
                tensors["attention_mask"][row].tolist(),
                strict=True,
            )
        ):
            if is_there:
                ids.append((token, place >= width and bool(mask[place - width])))
        rows.append(_runs(ids, tokenizer))
    return rows


def marked(rows: list[list[Piece]]) -> str:
    """For a terminal: trained tokens stand between « and »."""
    texts = [
        "".join(f"«{piece.text}»" if piece.trained else piece.text for piece in row) for row in rows
    ]
    return "\n--- another row ---\n".join(texts)


def _runs(ids: list[tuple[int, bool]], tokenizer: Any) -> list[Piece]:
    pieces: list[Piece] = []
    run: list[int] = []
    for place, (token, trained) in enumerate(ids):
        run.append(token)
        if place + 1 == len(ids) or ids[place + 1][1] != trained:
            pieces.append(Piece(tokenizer.decode(run), trained))
            run = []
    return pieces
