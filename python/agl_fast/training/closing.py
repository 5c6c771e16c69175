"""What is said at the end of a run, besides where its tokens went."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_DIFFERENCE = "training/audit/prob_diff_mean"
_CORRELATION = "training/audit/prob_correlation"


def note_worst_audit(worst: dict[str, float], metrics: Mapping[str, float]) -> None:
    """Keep the largest mean difference and the smallest correlation of a run's steps."""
    for name, choose in ((_DIFFERENCE, max), (_CORRELATION, min)):
        if name in metrics:
            worst[name] = choose(metrics[name], worst.get(name, metrics[name]))


def closing_lines(
    config: Any, worst_audit: Mapping[str, float], failures: str | None
) -> Iterator[str]:
    """
    Args:
        config: the whole configuration.
        worst_audit: as `note_worst_audit` keeps it.
        failures: how many rollouts failed, and the commonest reason.
    """
    if failures:
        yield f"{failures}."
    if _DIFFERENCE in worst_audit:
        correlation = worst_audit.get(_CORRELATION)
        yield (
            "audit of the servers' probabilities against the actor's, worst step: mean difference "
            f"{worst_audit[_DIFFERENCE]:.2g}"
            + ("" if correlation is None else f", correlation {correlation:.4f}")
            + "."
        )
    if checkpoint := last_checkpoint(config.trainer.get("default_local_dir")):
        yield f"last checkpoint: {checkpoint}"
    if recordings := config.agentlightning.get("record_dir"):
        yield f"recordings: {Path(recordings).absolute()} (python -m agl_fast analyze FILE)"


def last_checkpoint(folder: str | None) -> Path | None:
    """The one that a new run would resume from; None: none was saved here."""
    if folder is None:
        return None
    tracker = Path(folder) / "latest_checkpointed_iteration.txt"
    if not tracker.is_file():
        return None
    found = tracker.parent / f"global_step_{tracker.read_text().strip()}"
    return found.absolute() if found.is_dir() else None
