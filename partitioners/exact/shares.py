"""The shares of a batch of B samples that the replicas of a grouping can have, and a pipeline for each: only what could beat a
threshold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from hetpipe.partitioners.exact.batch import Index, PricedPipelines

MOST_PARTIAL = 20_000  # lists of the shares of the first replicas, kept at a time
COMBINATIONS = 1_000_000  # pipelines put side by side, for one list of shares


def narrow(open_: list[set[int]], B: int) -> bool:
    """Narrow the possible shares of each replica to those that the others can complete to B; False if none is
    left."""
    changed = True
    while changed:
        changed = False
        if not all(open_):
            return False
        low, high = sum(map(min, open_)), sum(map(max, open_))
        for shares in open_:
            fits = {n for n in shares if B - (high - max(shares)) <= n <= B - (low - min(shares))}
            if len(fits) < len(shares):
                shares &= fits
                changed = True
                break
    return True


def share_lists(
    least: Sequence[dict[int, float]], B: int, same: Sequence[bool], left_out: Callable[[float], None]
) -> list[tuple[float, tuple[int, ...]]]:
    """(bound, shares) of every way to share B samples out, least bound first. least[r] are the possible shares of replica r with
    their bounds. `same[r]`: replica r is like r − 1, so that only shares in falling order are listed. `left_out` is told
    the least bound of those given up for want of room."""
    open_ = [set(shares) for shares in least]
    if not narrow(open_, B):
        return []
    given, bound = np.zeros((1, 0), dtype=np.int64), np.zeros(1)
    for r, shares in enumerate(open_):
        low, high = sum(map(min, open_[r + 1 :])), sum(map(max, open_[r + 1 :]))
        own = np.array(sorted(shares))
        left = B - given.sum(axis=1)[:, None] - own
        possible = (low <= left) & (left <= high)
        if same[r]:
            possible &= own <= given[:, -1:]
        row, at = np.nonzero(possible)
        worst = np.array([least[r][n] for n in own.tolist()])
        given, bound = np.column_stack([given[row], own[at]]), np.maximum(bound[row], worst[at])
        if len(bound) > MOST_PARTIAL:
            order = np.argsort(bound, kind="stable")
            left_out(float(bound[order[MOST_PARTIAL]]))
            given, bound = given[order[:MOST_PARTIAL]], bound[order[:MOST_PARTIAL]]
    order = np.argsort(bound, kind="stable")
    return [(float(bound[i]), tuple(given[i].tolist())) for i in order]


def choices(
    pools: Sequence[PricedPipelines],
    lists: Iterable[tuple[int, ...]],
    same: Sequence[bool],
    chunk: int,
    left_out: Callable[[float], None],
) -> Iterator[list[Index]]:
    """Rows of each pool, of all plans with one pipeline per replica and one of these lists of shares: some at a time. Pools are
    in order of their bounds; like replicas with the same share take rows in rising order."""
    rows = [_by_share(pool) for pool in pools]
    waiting: list[list[Index]] = []
    number = 0
    for shares in lists:
        own = [of[n] for of, n in zip(rows, shares, strict=True)]
        shape = [len(x) for x in own]
        while math.prod(shape) > COMBINATIONS:
            r = int(np.argmax(shape))
            shape[r] -= 1 + shape[r] // 8
            left_out(float(pools[r].bound[own[r][shape[r]]]))
        total = math.prod(shape)
        for at in range(0, total, chunk):
            at_rows = unravel(np.arange(at, min(at + chunk, total)), shape)
            keep = np.ones(len(at_rows[0]), dtype=bool)
            for r in range(1, len(pools)):
                if same[r] and shares[r] == shares[r - 1]:
                    keep &= at_rows[r - 1] <= at_rows[r]
            waiting.append([x[i[keep]] for x, i in zip(own, at_rows, strict=True)])
            number += int(keep.sum())
            if number >= chunk:
                yield [np.concatenate(column) for column in zip(*waiting, strict=True)]
                waiting, number = [], 0
    if number:
        yield [np.concatenate(column) for column in zip(*waiting, strict=True)]


def _by_share(pool: PricedPipelines) -> dict[int, Index]:
    """The rows of a pool by their number of samples."""
    samples = pool.load[:, 1]
    return {int(n): np.flatnonzero(samples == n) for n in np.unique(samples)}


def least_by_share(pool: PricedPipelines) -> dict[int, float]:
    """The least bound of each number of samples."""
    return {n: float(pool.bound[rows].min()) for n, rows in _by_share(pool).items()}


def below(pool: PricedPipelines, limit: float, most: int | None) -> PricedPipelines:
    """The rows with a bound below the limit, of each number of samples the first `most`."""
    pool = pool.pick(pool.bound < limit)
    if most is None or not pool.number:
        return pool
    samples = pool.load[:, 1]
    order = np.argsort(samples, kind="stable")
    rank = np.arange(len(order)) - np.searchsorted(samples[order], samples[order])
    return pool.pick(np.sort(order[rank < most]))


def unravel(flat: Index, shape: list[int]) -> list[Index]:
    """Row numbers in each list of every combination, the last one fastest (numpy's own is limited to 64 lists)."""
    rows = []
    for length in reversed(shape):
        flat, row = np.divmod(flat, length)
        rows.append(row)
    return rows[::-1]
