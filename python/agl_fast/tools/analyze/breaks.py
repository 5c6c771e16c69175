"""Calls that extended no earlier one, and how."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from agl_fast.rows.accounting import MISMATCH_KINDS, Mismatch


@dataclass(frozen=True, slots=True)
class Break:
    """Calls of one kind (docs/rows.md, "Mismatches").

    Attributes:
        kind: one of ``MISMATCH_KINDS``.
        calls: of this kind.
        tokens: that they share with the closest chain, and that a row of their own repeats.
    """

    kind: str
    calls: int
    tokens: int


def breaks_of(mismatches: Sequence[Mismatch]) -> list[Break]:
    """By kind, those that occur."""
    of_kind: dict[str, list[Mismatch]] = defaultdict(list)
    for mismatch in mismatches:
        of_kind[mismatch.kind].append(mismatch)
    return [
        Break(kind, len(of_kind[kind]), sum(mismatch.index for mismatch in of_kind[kind]))
        for kind in MISMATCH_KINDS
        if of_kind[kind]
    ]
