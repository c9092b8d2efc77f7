"""The order of a pipeline's devices with which its longest stage is shortest: a compiled dynamic program over how many of each
kind the last stages are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetpipe.predict.compiled import compiled, get_ready, inlined, once
from hetpipe.predict.cost import peak_of

Array = NDArray[np.float64]
Index = NDArray[np.int64]
ORDER_TOLERANCE = 1e-3  # of the longest stage that is allowed, when its bisection ends


@once
def ready() -> None:
    """Compile the functions of this file, or read them from disk: outside of any time limit."""
    one, times = np.ones(1, np.int64), np.ones((1, 2))
    tables = np.zeros((1, 6, 2, 2))
    get_ready(lambda: best_order(one, times, times, one, 1, 1, False, tables, np.ones(1), 1.0, 2.0))


_peak = inlined(peak_of)


@inlined
def fit(v: int, lo: int, hi: int, window: int, samples: int, largest: int, again: bool, tables: Array, limits: Array) -> int:
    """How layers [lo, hi) fit on kind v, with tables [V, 6, lo, hi] and a limit for each, `window` samples in flight, and
    micro-batches of up to `largest`: 0 as they are, 1 with recompute if that is allowed `again`, −1 not at all."""
    static, boundary = tables[v, 0, lo, hi], tables[v, 1, lo, hi]
    if _peak(static, boundary, tables[v, 2, lo, hi], tables[v, 3, lo, hi], samples, window, largest) <= limits[v]:
        return 0
    if again and _peak(static, boundary, tables[v, 4, lo, hi], tables[v, 5, lo, hi], samples, window, largest) <= limits[v]:
        return 1
    return -1


@compiled
def _reach(
    T: float,
    take: Index,
    forward: Array,
    backward: Array,
    windows: Index,
    samples: int,
    largest: int,
    again: bool,
    tables: Array,
    limits: Array,
    least: Index,
    first: Index,
) -> bool:
    """Whether all layers can be on stages that each take no more than T for a full micro-batch. Of the last stages, by how many
    of each kind they are (a number in mixed radix), the least layer that they can begin with, −1 where they cannot be; and the
    kind that begins them. To begin with a lesser layer is never worse for those before."""
    V, L, n = len(take), forward.shape[1] - 1, take.sum()
    used = np.zeros(V, np.int64)
    least[0] = L
    for state in range(1, len(least)):
        v = 0
        while used[v] == take[v]:
            used[v] = 0
            v += 1
        used[v] += 1
        place, step = used.sum(), 1
        least[state], best = -1, L
        for v in range(V):
            hi = least[state - step] if used[v] > 0 else -1
            lo = hi
            while hi >= 0 and lo > n - place:
                own = forward[v, hi] - forward[v, lo - 1]
                own_back = backward[v, hi] - backward[v, lo - 1]
                if own + own_back > T:
                    break
                flag = fit(v, lo - 1, hi, windows[place - 1], samples, largest, again, tables, limits)
                if flag < 0 or own * (1 + flag) + own_back > T:
                    break
                lo -= 1
            # of equals that whose kind is the next stage's: outputs stay on the node
            if hi > lo and (lo < best or (lo == best and first[state - step] == v)):
                best, least[state], first[state] = lo, lo, v
            step *= take[v] + 1
    return bool(least[-1] == 0)


@compiled
def best_order(
    take: Index,
    forward: Array,
    backward: Array,
    windows: Index,
    samples: int,
    largest: int,
    again: bool,
    tables: Array,
    limits: Array,
    low: float,
    high: float,
) -> Index:
    """The kind of each stage, of so many of each, where the longest takes between `low` and `high` for a full micro-batch; −1
    where it takes more, or nothing fits. `windows` are the samples in flight of the last stage, the one before it, and so on."""
    V, states = len(take), 1
    for v in range(V):
        states *= take[v] + 1
    least, first, line, T = np.zeros(states, np.int64), np.full(states, -1), np.full(take.sum(), -1), high
    while True:
        if _reach(T, take, forward, backward, windows, samples, largest, again, tables, limits, least, first):
            high, state = T, states - 1
            for s in range(len(line)):
                line[s], step = first[state], 1
                for v in range(first[state]):
                    step *= take[v] + 1
                state -= step
        elif line[0] < 0:
            return line
        else:
            low = T
        if high - low <= ORDER_TOLERANCE * high:
            return line
        T = (low + high) / 2
