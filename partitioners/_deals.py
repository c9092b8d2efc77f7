"""Dealing M micro-batches to the replicas of a grouping: only deals that could beat a threshold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hetpipe.partitioners._space import Array

MOST_DEALS = 20_000  # partial deals kept at a time


def greedy_deal(tables: Sequence[Array], M: int) -> list[int]:
    """A deal that is good by tables[r][m − 1]: one micro-batch each, then each to the replica that ends first
    with it."""
    shares = [1] * len(tables)
    for _ in range(M - len(tables)):
        shares[
            int(
                np.argmin(
                    [
                        table[share] if share < M else math.inf
                        for table, share in zip(tables, shares, strict=True)
                    ]
                )
            )
        ] += 1
    return shares


def windows(open_: list[set[int]], M: int) -> bool:
    """Narrow the possible shares of each replica to those that the others can complete to M; False if none is
    left."""
    changed = True
    while changed:
        changed = False
        if not all(open_):
            return False
        low, high = sum(map(min, open_)), sum(map(max, open_))
        for shares in open_:
            fits = {m for m in shares if M - (high - max(shares)) <= m <= M - (low - min(shares))}
            if len(fits) < len(shares):
                shares &= fits
                changed = True
                break
    return True


def deals(
    tables: Sequence[Array],
    M: int,
    exact: Callable[[int, int], float],
    limit: Callable[[], float],
    same: Sequence[bool],
    left_out: Callable[[float], None],
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """(bound, shares) of every deal whose bound is below `limit()`, least first. tables[r][m] is a cheap
    bound of replica r with m micro-batches, `exact(r, m)` the best that any of its pipelines reaches.
    `same[r]`: replica r is like r − 1, so that only shares in falling order are listed. The exact values are
    asked for from the largest share down: each one that fails narrows all windows. `left_out` is told the
    least bound of deals given up for want of room."""
    open_ = [set((1 + np.flatnonzero(table[1:] < limit())).tolist()) for table in tables]
    known: dict[tuple[int, int], float] = {}
    while True:
        if not windows(open_, M):
            return
        unknown = [
            (r, max(set(shares) - {m for s, m in known if s == r}))
            for r, shares in enumerate(open_)
            if any((r, m) not in known for m in shares)
        ]
        if not unknown:
            break
        r, m = min(unknown, key=lambda pair: (len(open_[pair[0]]), pair))
        twin = _twin(r, m, known, same)
        known[r, m] = exact(r, m) if twin is None else twin
        if known[r, m] >= limit():
            open_[r].discard(m)
    found = sorted(_all(open_, known, M, same, left_out))
    for bound, shares in found:
        if bound >= limit():
            return
        yield bound, shares


def _twin(r: int, m: int, known: dict[tuple[int, int], float], same: Sequence[bool]) -> float | None:
    if r and same[r] and (r - 1, m) in known:
        return known[r - 1, m]
    return known.get((r + 1, m)) if r + 1 < len(same) and same[r + 1] else None


def _all(
    open_: list[set[int]],
    known: dict[tuple[int, int], float],
    M: int,
    same: Sequence[bool],
    left_out: Callable[[float], None],
) -> list[tuple[float, tuple[int, ...]]]:
    """Every deal within the windows, with the largest of its parts."""
    partial: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for r, shares in enumerate(open_):
        low, high = sum(map(min, open_[r + 1 :])), sum(map(max, open_[r + 1 :]))
        partial = [
            (max(bound, known[r, m]), (*dealt, m))
            for bound, dealt in partial
            for m in sorted(shares)
            if low <= M - sum(dealt) - m <= high and not (same[r] and m > dealt[-1])
        ]
        if len(partial) > MOST_DEALS:
            partial.sort()
            left_out(partial[MOST_DEALS][0])
            del partial[MOST_DEALS:]
    return partial
