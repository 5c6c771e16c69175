"""The report of a run: a table, a chart, and rollouts with their trained tokens marked."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

import agl_fast
from agl_fast.printable import escaped
from agl_fast.quickstart.run_log import Played, RunLog
from agl_fast.rows.levels import LEVELS, Level, LevelName
from agl_fast.rows.options import Limits

STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 760px; margin: 2em auto; color: #222 }
table { border-collapse: collapse } td, th { padding: 2px 14px 2px 0; text-align: right }
td:first-child, th:first-child { text-align: left }
pre { white-space: pre-wrap; background: #f6f6f6; padding: 1em }
.trained { background: #ffd9a0 } .read { color: #555 }
"""


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens that are all trained, or all context."""

    text: str
    trained: bool


def table_of(log: RunLog, peak_memory_gib: float) -> list[tuple[str, str, str]]:
    """Results in three columns."""
    before, after = log.validations[min(log.validations)], log.validations[max(log.validations)]
    lines = [
        ("", "before", "after"),
        ("validation reward", f"{before:.3f}", f"{after:.3f}"),
        ("", "rows", "tokens"),
    ]
    for level in LEVELS:
        forwarded = log.forwarded[level]
        name = f"forwarded at level {level}"
        lines.append((name, f"{forwarded.rows:,}", f"{forwarded.tokens:,}"))
    if log.update_seconds:
        lines.append(("update of the first step", "", "seconds"))
        lines += [(f"at level {level}", "", f"{log.update_seconds[level]:.2f}") for level in LEVELS]
    lines.append(("", "", "seconds"))
    lines += [(stage, "", f"{seconds:.1f}") for stage, seconds in log.seconds.items()]
    lines += [("", "", "GiB"), ("peak memory", "", f"{peak_memory_gib:.1f}")]
    return lines


def explain_row_counts(log: RunLog, run_folder: Path) -> str:
    """Explain how the table's rows and tokens differ from those of `analyze`."""
    left_out = (
        f" They exclude {log.left_out:,} rollouts that failed or made no call."
        if log.left_out
        else ""
    )
    return (
        "Rows and tokens are those of the training rollouts without limits; "
        f"python -m agl_fast analyze {run_folder}/recordings/*/train-*.jsonl.gz shows them beside "
        f"those within each level's limits.{left_out}"
    )


def pieces_of(played: Played, tokenizer: Any, level: LevelName = "trajectory") -> list[list[Piece]]:
    """The rollout's rows as pieces; at level tree each branch is a list of its own."""
    options = Limits().options(level, layout="jagged")
    rollout = agl_fast.Rollout("played", "played", played.calls, played.reward)
    tensors = agl_fast.build_batch([rollout], **options.keywords()).tensors
    names = ("prompts", "input_ids", "response_mask", "position_ids")
    rows = zip(*(tensors[each].unbind() for each in names), strict=True)
    pieces = []
    for prompt, ids, mask, positions in rows:
        trained = [False] * len(prompt) + mask.bool().tolist()
        tokens = list(zip(ids.tolist(), trained, strict=True))
        branches = [0, *((positions.diff() != 1).nonzero().flatten() + 1).tolist(), len(tokens)]
        for begin, end in pairwise(branches):
            runs = groupby(tokens[begin:end], key=lambda token: token[1])
            pieces.append(
                [Piece(tokenizer.decode([token for token, _ in run]), kind) for kind, run in runs]
            )
    return pieces


def marked(rows: list[list[Piece]], level: LevelName = "trajectory") -> str:
    """Format rows for a terminal, with trained tokens between « and ».

    In the text itself, these two characters, control characters and lines that look like the
    separator between two rows are escaped.
    """
    separator = f"--- another {'branch' if Level.of(level).is_tree else 'row'} ---"
    texts = []
    for row in rows:
        pieces = [(escaped(piece.text, also="«»"), piece.trained) for piece in row]
        text = "".join(f"«{text}»" if trained else text for text, trained in pieces)
        texts.append(re.sub(f"(?m)^{separator}", f"\\\\{separator}", text))
    return f"\n{separator}\n".join(texts)


def write_report(
    folder: Path,
    log: RunLog,
    shown: Mapping[str, list[list[Piece]]],
    peak_memory_gib: float,
) -> tuple[Path, Path]:
    """Write `report.html`, which contains the chart, and the chart as `report.png`.

    Args:
        shown: rows by title, as `pieces_of` returns them.

    Returns:
        The two files.
    """
    page, picture = folder / "report.html", folder / "report.png"
    chart(log).savefig(picture)
    page.write_text(_page(log, picture.read_bytes(), shown, peak_memory_gib), encoding="utf-8")
    return page, picture


def chart(log: RunLog) -> Figure:
    """Training and validation reward by step."""
    figure = Figure(figsize=(7.2, 3.2), dpi=100, layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(log.rewards) + 1), log.rewards, label="training reward")
    axes.plot(*zip(*sorted(log.validations.items()), strict=True), "o-", label="validation reward")
    axes.set(xlabel="step", ylim=(-0.02, 1.02))
    axes.grid(axis="y")
    axes.legend()
    return figure


def _page(
    log: RunLog, picture: bytes, shown: Mapping[str, list[list[Piece]]], peak_memory_gib: float
) -> str:
    table = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>"
        for line in table_of(log, peak_memory_gib)
    )
    trajectories = "".join(
        f"<h2>{escape(title)}</h2>" + "".join(f"<pre>{_coloured(row)}</pre>" for row in rows)
        for title, rows in shown.items()
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>agl_fast quickstart</title><style>{STYLE}</style></head><body>"
        '<h1>agl_fast quickstart</h1><img alt="rewards by step" '
        f'src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
        f"<table>{table}</table>"
        '<p><span class="trained">Trained tokens</span> were sampled by the model. '
        '<span class="read">All others</span> are context.</p>'
        f"{trajectories}</body></html>\n"
    )


def _coloured(row: Sequence[Piece]) -> str:
    kinds = {True: "trained", False: "read"}
    return "".join(
        f'<span class="{kinds[piece.trained]}">{escape(escaped(piece.text))}</span>'
        for piece in row
    )
