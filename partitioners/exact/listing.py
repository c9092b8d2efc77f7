"""All pipelines of one composition, load and family of warm-up depths that could be part of a plan faster than a threshold.

Stages are put on from the last to the first, depth first, each partial pipeline with its bound g and round trip u (see
`composition_bounds`). It is dropped when what it has, and the least that the layers and devices that are left must add, reaches
the threshold."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hetpipe.partitioners.compositions.stage_times import Warmup, fits, idle, joined, stage_seconds
from hetpipe.partitioners.stage_kinds.plan_class import Family, Load
from hetpipe.partitioners.stage_kinds.space import Array, Counts, Index, Loaded, Space
from hetpipe.predict.compiled import compiled, inlined

STEPS = 20_000_000  # stages that are tried for one list


class Rows(NamedTuple):
    """Pipelines of n stages, first to last: kinds [N, n], cuts [N, n + 1], which stages recompute [N, n], and bounds [N]."""

    kinds: Index
    cuts: Index
    recompute: Index
    bound: Array

    def pick(self, rows: Index | slice) -> Rows:
        """Some of them."""
        return Rows._make(column[rows] for column in self)


def rows_below(
    space: Space, comp: Counts, family: Family, load: Load, threshold: float, least: float, most: int
) -> tuple[Rows, float]:
    """All pipelines whose bound is below the threshold, least bound first, and the threshold. Where these
    are more than `most`, or it takes too long, a lower threshold, down to the `least` that any has."""
    counts, n, x = np.array(comp, dtype=np.int64), sum(comp), space.loaded(load)
    for _ in range(8):
        kinds, cuts, recompute = (np.empty((most, width), np.int64) for width in (n, n + 1, n))
        rows = Rows(kinds, cuts, recompute, np.empty(most))
        number, steps = _list(x, Warmup.of(family), counts, threshold, *rows)
        space.meter.count(steps)
        if number < most and steps < STEPS:
            rows = rows.pick(slice(number))
            return rows.pick(np.argsort(rows.bound, kind="stable")), threshold
        threshold = (min(threshold, 2 * float(rows.bound[:number].max(initial=least))) + least) / 2
    return rows.pick(slice(0)), least


@compiled
def _before(x: Loaded, warmup: Warmup, comp: Index, radix: Index) -> tuple[Array, Array, Array]:
    """Bounds on the first stages, by which stages they are (their mixed-radix number) and their last layer [parts, L + 1]: least
    time once through, and least bound from a stage's work. And the least of any two kinds at
    each boundary [L + 1]."""
    K, L, n, whole = len(comp), len(x.returns) - 1, comp.sum(), (comp * radix).sum()
    through, work, hop = np.full((whole, L + 1), np.inf), np.full((whole, L + 1), np.inf), np.full(L + 1, np.inf)
    for k in range(K):
        for j in range(K):
            for hi in range(1, L if comp[k] > 0 and comp[j] > (j == k) else 0):
                hop[hi] = min(hop[hi], joined(x, k, j, hi)[0])
    for part in range(1, whole):  # what it is made of has a smaller number
        stages = 0
        for k in range(K):
            stages += part // radix[k] % (comp[k] + 1)
        for k in range(K):
            if part // radix[k] % (comp[k] + 1) == 0:
                continue
            v, before = x.at[k], part - radix[k]
            for lo in range(1 if stages == 1 else L):
                start = 0.0 if stages == 1 else through[before, lo] + hop[lo]
                for hi in range(lo + 1, L if start < np.inf else 0):
                    fit = fits(x, v, lo, hi, n - stages + 1, warmup.held)
                    if fit < 0:
                        continue
                    own, once, _, _ = stage_seconds(x, v, lo, hi, fit)
                    through[part, hi] = min(through[part, hi], start + once)
                    least = max(0.0 if stages == 1 else work[before, lo], start + own)
                    work[part, hi] = min(work[part, hi], least)
    return through, work, hop


@inlined
def _grow(x: Loaded, warmup: Warmup, line: Index, state: Array, place: int) -> float:
    """Put a stage before those behind it: its g, which is now in its state with u and the longest optimizer."""
    k, lo, hi, fit = line[place, 0], line[place, 1], line[place - 1, 1], line[place, 2]
    g, u, f, b = stage_seconds(x, x.at[k], lo, hi, fit)
    if place > 1:
        both, queue = joined(x, k, line[place - 1, 0], hi)
        away = both + state[place - 1, 1]
        onward = u + max(both + state[place - 1, 0], queue + state[place - 1, 1])
        g, u = max(g + idle(x, away, f, b, hi, place, warmup), onward), u + away
    state[place, 0], state[place, 1] = g, u
    state[place, 2] = max(state[place - 1, 2], x.optimizer[x.at[k], lo, hi])
    return g


@compiled
def _list(
    x: Loaded, warmup: Warmup, comp: Index, threshold: float, kinds: Index, cuts: Index, recompute: Index, bounds: Array
) -> tuple[int, int]:
    """Fill in all rows below the threshold, until there is no room: how many there are, and how many stages were tried."""
    K, L, n = len(comp), len(x.returns) - 1, comp.sum()
    radix = np.ones(K, np.int64)
    for k in range(1, K):
        radix[k] = radix[k - 1] * (comp[k - 1] + 1)
    through, work, hop = _before(x, warmup, comp, radix)
    left, rest = comp.copy(), (comp * radix).sum()
    number, steps, place = 0, len(through) * K * L * L // 4, 1
    # Of each stage, by its place from the end: kind, first layer, recompute; g, u, longest optimizer, bound; what is tried next.
    line, state, tried = np.zeros((n + 1, 3), np.int64), np.zeros((n + 1, 4)), np.zeros(n + 2, np.int64)
    line[0, 1] = L
    while place > 0:
        k, lo = tried[place] // L, tried[place] % L
        hi, last = line[place - 1, 1], place == n
        if k == K or steps > STEPS:
            place -= 1
            if place > 0:
                left[line[place, 0]] += 1
                rest += radix[line[place, 0]]
            continue
        if left[k] == 0 or lo >= hi or (last and lo > 0):
            tried[place] = (k + 1) * L
            continue
        tried[place] += 1
        steps += 1
        fit = fits(x, x.at[k], lo, hi, place, warmup.held) if lo >= n - place else -1
        if fit < 0:
            continue
        line[place, 0], line[place, 1], line[place, 2] = k, lo, fit
        end = _grow(x, warmup, line, state, place)
        if not last:
            end = max(end + through[rest - radix[k], lo] + hop[lo], work[rest - radix[k], lo])
        state[place, 3] = max(end + state[place, 2], state[place - 1, 3])
        if state[place, 3] >= threshold:
            continue
        if not last:
            left[k] -= 1
            rest -= radix[k]
            place += 1
            tried[place] = 0
            continue
        for s in range(n):
            kinds[number, s], cuts[number, s], recompute[number, s] = line[n - s]
        cuts[number, n], bounds[number] = L, state[place, 3]
        number += 1
        if number == len(bounds):
            break
    return number, steps
