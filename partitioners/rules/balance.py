"""Cuts of a pipeline by bisection, compiled."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from hetpipe.predict.compiled import compiled, get_ready

Array = NDArray[np.float64]
Index = NDArray[np.int64]
HALVINGS, NEAR = 40, 1e-6  # of the longest stage that is allowed, until it is known so well


def shortest_cuts(seconds: Array, reach: Index) -> tuple[int, ...] | None:
    """The ends of n stages, 0 first, of which the longest is short. `seconds` [n, L + 1] of all layers before each on the stage's
    device, `reach` [n, L + 1] where a stage that begins at a layer may end. None where memory does not hold all layers so.

    The longest stage that is allowed is bisected; below it each stage in turn takes as many layers as it can, and leaves one to
    each after it. On devices of one speed there are no better cuts (to NEAR); on unlike ones there are where a slow device that
    may not stay empty meets a long layer."""
    ready()
    ends = _bisected(seconds, reach)
    return None if ends[-1] < 0 else tuple(ends.tolist())


@cache
def ready() -> None:
    """Compile the functions of this file, or read them from disk: outside of any time limit."""
    get_ready(lambda: _bisected(np.zeros((1, 2)), np.ones((1, 2), np.int64)))


@compiled
def _within(longest: float, seconds: Array, reach: Index, ends: Index) -> float:
    """The longest stage of the cuts that are found, put into `ends`; -1 where there are none."""
    n, L = seconds.shape[0], seconds.shape[1] - 1
    lo, most = 0, 0.0
    for s in range(n):
        row = seconds[s]
        hi = np.searchsorted(row, row[lo] + longest, side="right") - 1
        hi = min(hi, reach[s, lo], L - (n - 1 - s))
        if hi <= lo:
            return -1.0
        most = max(most, row[hi] - row[lo])
        lo = hi
        ends[s + 1] = lo
    return most if lo == L else -1.0


@compiled
def _bisected(seconds: Array, reach: Index) -> Index:
    n = seconds.shape[0]
    ends, best = np.zeros(n + 1, np.int64), np.zeros(n + 1, np.int64)
    low, high = 0.0, _within(seconds[:, -1].max(), seconds, reach, best)
    if high < 0:
        best[-1] = -1
        return best
    for _ in range(HALVINGS):
        if high - low <= NEAR * high:
            break
        middle = (low + high) / 2
        found = _within(middle, seconds, reach, ends)
        if found < 0:
            low = middle
        else:
            high = found
            best[:] = ends
    return best
