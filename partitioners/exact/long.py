"""Long pipelines in a few device orders: for clusters on which only pipelines longer than those bounded fit.

A heuristic. For a fixed order of devices the cuts with the least largest stage are found exactly, by a
dynamic program from the last stage backward: best[s][lo] = min over hi of max(work_s(lo, hi), best[s +
1][hi]), O(n·L²)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hetpipe.partitioners.exact.batch import PricedPipelines
from hetpipe.partitioners.exact.candidates import Enumeration, PartialPipelines, Variant
from hetpipe.partitioners.stage_kinds.space import Counts, Load, Space, families_of


def orders(space: Space, b: int) -> Iterator[list[int]]:
    """Device kinds, first stage to last: by memory, by speed and as in the file, either way, 1 to L devices."""
    usable = [k for k in range(space.K) if space.measured(k, b)]
    speed = {k: float(space.prefixes(k, [b])[0][0, space.L]) for k in usable}
    for key in (lambda k: -space.limits[k], lambda k: speed[k], lambda k: k):
        line: list[int] = []
        for k in sorted(usable, key=key):
            while len(line) < space.L and space.room(tuple([*line, k].count(j) for j in range(space.K))):
                line.append(k)
        for n in range(1, min(space.L, len(line)) + 1):
            if not space.one_node or len({space.kinds[k].node for k in line[:n]}) == 1:
                yield line[:n]
                yield line[:n][::-1]


def long_pipelines(space: Space, load: Load) -> Iterator[tuple[Counts, PricedPipelines]]:
    """Each order and depth family with its best-balanced cuts, priced."""
    for order in orders(space, load.b):
        comp = tuple(order.count(k) for k in range(space.K))
        for family in families_of(space.families, len(order), load.m):
            enumeration = Enumeration(space, comp, [Variant(family, load)], 1)
            row = _balanced(enumeration, order)
            if row is not None:
                yield comp, enumeration.price(row)


def _balanced(enumeration: Enumeration, order: list[int]) -> PartialPipelines | None:
    """The cuts with the least largest stage, as one row of an enumeration; None if nothing fits."""
    space, n = enumeration.space, len(order)
    best = np.full(space.L + 1, np.inf)
    best[space.L] = 0.0
    choices = []
    for place, k in enumerate(reversed(order), 1):
        largest = np.maximum(enumeration.stage(k, place).work[0], best[None, :])
        choices.append(largest.argmin(axis=1))
        best = largest.min(axis=1)
    if not np.isfinite(best[0]):
        return None
    cuts = [0]
    for s in range(n):
        cuts.append(int(choices[n - 1 - s][cuts[-1]]))
    optimizer = max(
        float(space.optimizer(k)[lo, hi]) for k, lo, hi in zip(order, cuts, cuts[1:], strict=False)
    )
    zero = np.zeros(1)
    used = np.zeros((1, space.K), dtype=np.int64)
    return PartialPipelines(
        np.zeros(1, dtype=np.int64),
        np.array([order[::-1]]), np.array([cuts[::-1]]), used, zero, zero, np.array([optimizer]), zero
    )
