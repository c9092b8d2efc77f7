"""Which pipelines fill a cluster best, when there are too many groupings to list: an integer program over
counts."""

from __future__ import annotations

import numpy as np

from hetpipe.partitioners.compositions.groupings import Bounds, Grouping
from hetpipe.partitioners.stage_kinds.space import Counts, Space
from hetpipe.planning.programs import Program


def pack(
    space: Space,
    capacities: dict[Counts, int],
    need: int,
    prices: dict[Counts, float],
    most_price: float,
    cheapest: bool,
) -> Grouping | None:
    """A grouping of at most so many devices, `most_price` per hour and `need` replicas that can do `need`
    samples: the one with the largest capacity, or the cheapest. One row per group of interchangeable devices, one column per
    composition (HiGHS); the size of the program does not depend on how many devices there are. None if no
    grouping can; TimeoutError if it is not known."""
    comps = list(capacities)
    if not comps:
        return None
    devices = np.array([space.used(c) for c in comps], dtype=np.float64).T  # [groups, C]
    capacity = np.array([capacities[c] for c in comps], dtype=np.float64)
    price = np.array([prices[c] for c in comps])
    rows = np.vstack([devices, capacity, np.ones(len(comps)), price])
    low = [*np.zeros(len(devices)), need, 1, 0]
    high = [*space.devices, np.inf, need, most_price * (1 + 1e-12)]
    # Fewer devices where it makes no difference, so that equal cases give equal plans.
    fewer = 1e-4 * devices.sum(axis=0) / max(1, sum(space.devices))
    cost = (price if cheapest else -capacity) + fewer
    program = Program(rows, low, high, whole=True)
    found = program.least(cost, max(space.devices))
    if found is None and not program.known:
        raise TimeoutError
    if found is None:
        return None
    times = np.rint(found.x).astype(int)
    return tuple(c for c, number in zip(comps, times, strict=True) for _ in range(number))


def packings(
    bounds: Bounds, most_price: float, threshold: float, cheapest: bool
) -> tuple[float, list[Grouping]]:
    """(a lower bound on every step with these compositions and two or more replicas, promising groupings):
    the least T at which some grouping's capacities reach B, found by bisection; and the groupings at T and a
    little above, where pipelines that end a little later leave room for others."""
    prices = {c: bounds.space.price(c) for c in bounds.comps}

    def at(T: float) -> Grouping | None:
        capacities = bounds.capacities(T)
        return pack(bounds.space, capacities, bounds.B, prices, most_price, cheapest)

    firsts = [float(bounds.least(c, 2)[0]) for c in bounds.comps]
    low, high = (
        min(firsts, default=np.inf),
        max((float(bounds.least(c, 2)[-1]) for c in bounds.comps), default=np.inf),
    )
    high = min(
        threshold, high if np.isfinite(high) else max((f for f in _finite(bounds)), default=np.inf)
    ) * (1 + 1e-9)
    found: list[Grouping] = []
    try:
        if not np.isfinite(high) or at(high) is None:
            return np.inf, []
        while high - low > 1e-4 * high and not bounds.late():
            middle = (low + high) / 2
            low, high = (low, middle) if at(middle) is not None else (middle, high)
        for factor in (1.0, 1.005, 1.01, 1.02, 1.03, 1.05, 1.08, 1.12):
            grouping = None if bounds.late() else at(high * factor)
            found += [] if grouping is None else [grouping]
    except TimeoutError:  # what is proven so far holds
        pass
    return low, list(dict.fromkeys(found))


def _finite(bounds: Bounds) -> list[float]:
    """All finite bounds of compositions in plans of several replicas."""
    tables = [bounds.least(c, 2) for c in bounds.comps]
    return [float(table[np.isfinite(table)].max()) for table in tables if np.isfinite(table).any()]
