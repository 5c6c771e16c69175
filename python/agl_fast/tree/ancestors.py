"""Ancestors in a row whose tokens are in depth-first order.

Depths determine the tree: a token's parent is the last token before it with a depth one less.
Concatenated rows are a forest; a row without branches is a tree with one run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens start … stop - 1, each the parent of the next one.

    Attributes:
        above: (start, stop) segments of the run's ancestors, from the root down.
    """

    start: int
    stop: int
    above: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Links:
    """T tokens in depth-first order.

    Attributes:
        parents: (T,) index of each token's parent, -1 at roots.
        ends: (T,) end of each token's subtree, exclusive.
        runs: all tokens, split wherever a token does not follow its parent.
    """

    parents: Numbers
    ends: Numbers
    runs: tuple[Run, ...]


def link(depths: Numbers) -> Links:
    """Parents, subtree ends and runs from depths, in O(T).

    Args:
        depths: (T,) number of ancestors of each token, from position_ids; T is at least 1.

    Raises:
        ValueError: the depths are not those of a tree in depth-first order.
    """
    n_tokens = len(depths)
    parents = np.arange(-1, n_tokens - 1, dtype=np.int64)
    ends = np.full(n_tokens, n_tokens, dtype=np.int64)
    starts = [0, *(np.flatnonzero(np.diff(depths) != 1) + 1).tolist()]
    runs = []
    path: list[tuple[int, int]] = []  # segments from the root to the previous token
    n_above = 0
    for start, stop in zip(starts, [*starts[1:], n_tokens], strict=True):
        depth = int(depths[start])
        if not 0 <= depth <= n_above:
            raise ValueError(
                f"position_ids[{start}]={depth} after {n_above - 1}: expected the depths of a "
                f"tree in depth-first order, at most {n_above} here"
            )
        while n_above > depth:
            first, behind = path.pop()
            kept = max(behind - (n_above - depth), first)
            ends[kept:behind] = start
            n_above -= behind - kept
            if kept > first:
                path.append((first, kept))
        parents[start] = path[-1][1] - 1 if path else -1
        runs.append(Run(start, stop, tuple(path)))
        path.append((start, stop))
        n_above += stop - start
    return Links(parents, ends, tuple(runs))
