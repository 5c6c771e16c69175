"""Who is above whom in a row whose tokens stand in depth-first order.

Depth alone says it: the parent of a token is the last one before it that is one less deep. Several
rows one after another are a forest, and a row without branches is a tree of one run.
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
        above: stretches of all that is above the run, from the root downwards.
    """

    start: int
    stop: int
    above: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Links:
    """T tokens in depth-first order.

    Attributes:
        parents: (T,) position of each token's parent, -1 at roots.
        ends: (T,) where the subtree below each token ends, exclusive.
        runs: all tokens, cut where one does not follow its parent.
    """

    parents: Numbers
    ends: Numbers
    runs: tuple[Run, ...]


def link(depths: Numbers) -> Links:
    """Read the tree from its depths, in O(T).

    Args:
        depths: (T,) how many tokens are above each one: position_ids; T is at least 1.

    Raises:
        ValueError: no tree in depth-first order has these depths.
    """
    n_tokens = len(depths)
    parents = np.arange(-1, n_tokens - 1, dtype=np.int64)
    ends = np.full(n_tokens, n_tokens, dtype=np.int64)
    starts = [0, *(np.flatnonzero(np.diff(depths) != 1) + 1).tolist()]
    runs = []
    path: list[tuple[int, int]] = []  # stretches from the root to the token before
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
