"""What is left of a run: a table, a page of HTML that needs no other file, and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from PIL import Image, ImageDraw

from agl_fast.printable import escaped
from agl_fast.quickstart.run_log import RunLog
from agl_fast.quickstart.trajectory import Piece
from agl_fast.rows.levels import LEVELS

Point = tuple[float, float]

WIDTH, HEIGHT, MARGIN = 720, 320, 48
TRAINING_COLOUR, VALIDATION_COLOUR, AXIS_COLOUR = "#1f77b4", "#d62728", "#888888"
STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 760px; margin: 2em auto; color: #222 }
table { border-collapse: collapse } td, th { padding: 2px 14px 2px 0; text-align: right }
td:first-child, th:first-child { text-align: left }
pre { white-space: pre-wrap; background: #f6f6f6; padding: 1em }
.trained { background: #ffd9a0 } .read { color: #555 }
"""


def table_of(log: RunLog, peak_memory_gib: float) -> list[tuple[str, str, str]]:
    """The result in three columns."""
    before, after = _first_and_last(log)
    lines = [
        ("", "before", "after"),
        ("validation reward", f"{before:.3f}", f"{after:.3f}"),
        ("", "rows", "tokens"),
    ]
    for level in LEVELS:
        taken = log.forwarded[level]
        lines.append((f"forwarded at level {level}", f"{taken.rows:,}", f"{taken.tokens:,}"))
    if log.update_seconds:
        lines.append(("update of the first step", "", "seconds"))
        lines += [(f"at level {level}", "", f"{log.update_seconds[level]:.2f}") for level in LEVELS]
    lines.append(("", "", "seconds"))
    lines += [(stage, "", f"{seconds:.1f}") for stage, seconds in log.seconds.items()]
    lines += [("", "", "GiB"), ("peak memory", "", f"{peak_memory_gib:.1f}")]
    return lines


def where_rows_are_counted_again(log: RunLog, run_folder: Path) -> str:
    """What the table's rows and tokens are, beside those that `analyze` shows."""
    left_out = (
        f" They lack {log.left_out:,} rollouts that failed or made no call, which it counts, too."
        if log.left_out
        else ""
    )
    return (
        "Rows and tokens are those of the training rollouts, nothing cut by limits; "
        f"python -m agl_fast analyze {run_folder}/recordings/*/train-*.jsonl.gz shows them beside "
        f"those that each level's limits leave.{left_out}"
    )


def plain_table(lines: Sequence[tuple[str, str, str]]) -> str:
    return "\n".join(f"  {name:<32}{first:>12}{second:>12}" for name, first, second in lines)


def write_report(
    folder: Path,
    log: RunLog,
    shown: Mapping[str, list[list[Piece]]],
    peak_memory_gib: float,
) -> tuple[Path, Path]:
    """Write `report.html` and `report.png` to `folder`.

    Args:
        shown: by title, as `pieces_of` gives them.

    Returns:
        The two files.
    """
    page, picture = folder / "report.html", folder / "report.png"
    page.write_text(_page(log, shown, peak_memory_gib), encoding="utf-8")
    _picture(log).save(picture)
    return page, picture


def _first_and_last(log: RunLog) -> tuple[float, float]:
    return log.validations[min(log.validations)], log.validations[max(log.validations)]


def _curves(log: RunLog) -> list[tuple[str, str, list[Point]]]:
    """Name, colour and points on the picture."""

    def place(step: float, reward: float) -> Point:
        x = MARGIN + (WIDTH - 2 * MARGIN) * step / max(1, len(log.rewards))
        return x, HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * reward

    training = [place(step, reward) for step, reward in enumerate(log.rewards, start=1)]
    validation = [place(step, reward) for step, reward in sorted(log.validations.items())]
    return [
        ("training reward", TRAINING_COLOUR, training),
        ("validation reward", VALIDATION_COLOUR, validation),
    ]


def _page(log: RunLog, shown: Mapping[str, list[list[Piece]]], peak_memory_gib: float) -> str:
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
        f"<h1>agl_fast quickstart</h1>{_svg(log)}<table>{table}</table>"
        '<p><span class="trained">Trained tokens</span> were written by the model. '
        '<span class="read">All others</span> it only read.</p>'
        f"{trajectories}</body></html>\n"
    )


def _coloured(row: Sequence[Piece]) -> str:
    return "".join(
        f'<span class="{kind}">{escape(escaped(text))}</span>'
        for kind, text in (("trained" if piece.trained else "read", piece.text) for piece in row)
    )


def _svg(log: RunLog) -> str:
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="rewards">']
    for reward in (0, 0.5, 1):
        y = HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * reward
        parts.append(
            f'<path d="M{MARGIN} {y}H{WIDTH - MARGIN}" stroke="{AXIS_COLOUR}" stroke-width=".5"/>'
            f'<text x="8" y="{y + 5}" font-size="13">{reward}</text>'
        )
    for index, (name, colour, points) in enumerate(_curves(log)):
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{MARGIN + 180 * index}" y="20" font-size="13" fill="{colour}">{name}</text>'
        )
    parts.append(f'<text x="{WIDTH // 2}" y="{HEIGHT - 12}" font-size="13">step</text></svg>')
    return "".join(parts)


def _picture(log: RunLog) -> Image.Image:
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    for reward in (0, 0.5, 1):
        y = HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * reward
        draw.line([(MARGIN, y), (WIDTH - MARGIN, y)], fill=AXIS_COLOUR)
        draw.text((8, y - 6), str(reward), fill="black")
    for index, (name, colour, points) in enumerate(_curves(log)):
        draw.line(points, fill=colour, width=2)
        draw.text((MARGIN + 180 * index, 12), name, fill=colour)
    draw.text((WIDTH // 2, HEIGHT - 20), "step", fill="black")
    return image
