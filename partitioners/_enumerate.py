"""The loops of the counted planner, compiled by numba at their first use and then kept on disk: which stages can end where
(`held`, `reach`), what layers must cost (`to_go`), the enumeration of pipelines (`search`). `_columns` says what they compute,
and why it is right.

They are all in one file: of what numba has on disk it only compares the file of the function itself with what is there now."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Flags = NDArray[np.bool_]
F = TypeVar("F", bound=Callable[..., Any])

FIRST = 64  # rows that arrays have room for at first
LOAD, LO, USED = 0, 1, 4  # columns of a row: load, first layer, the row and kind of stage it comes from, then devices used


def compiled(function: F) -> F:
    """The same, compiled; kept on disk where a folder for that can be written to."""
    compiler = partial(njit, nogil=True, error_model="numpy")
    try:
        return cast(F, compiler(cache=True)(function))
    except RuntimeError:  # numba found no such folder
        return cast(F, compiler()(function))


def inlined(function: F) -> F:
    """The same, compiled as a part of the functions that call it."""
    return cast(F, njit(inline="always", error_model="numpy")(function))


class Tables(NamedTuple):
    """Those of `Stages`: `times` [sizes, V, hi, lo, 5] are work, forward, longest forward and backward, and rate; `places`
    [V, hi, lo, 7] room, boundary and transient, without and with recompute, and the optimizer; `links` [sizes, K, masks, hi, 2]
    hop and wire; `parts` [sizes, 3] forward_part and last. The last layers first, since searches go on from these. `forwards`
    are those of the families allowed; whether `gpipe` is one, too."""

    times: Array
    places: Array
    links: Array
    least: Array
    parts: Array
    usable: Flags
    counts: Index
    at: Index
    degree: Index
    forwards: Index
    gpipe: bool
    masked: bool
    overhead: float


class Given(NamedTuple):
    """[G] loads: index of the micro-batch size b; the fewest and the most samples; b; full micro-batches, and samples of
    the last one, of the fewest samples."""

    size: Index
    low: Index
    high: Index
    b: Index
    m: Index
    q: Index


class End(NamedTuple):
    """When a step is to end; gradient sums of stages [V, hi, lo], and the least of any first stage."""

    T: float
    sums: Array
    shortest: float


class Found(NamedTuple):
    """Compositions [N, K] that are worth their price with most samples and their sizes [N]; loads of such [G]; whether
    these are all; candidates seen."""

    used: Index
    samples: Index
    size: Index
    hit: Flags
    complete: bool
    seen: int


@compiled
def held(t: Tables, loads: Given) -> Index:
    """[G, V, hi]: the first lo from which a stage fits in memory with one micro-batch in flight; L + 1 if none does."""
    places, V, L = t.places, len(t.at), t.least.shape[1] - 1
    found = np.full((len(loads.low), V, L + 1), L + 1)
    for g in range(len(loads.low)):
        n, some = loads.low[g], min(loads.low[g], loads.b[g])
        for v in range(V):
            for hi in range(L + 1):
                for lo in range(hi):
                    if _room(places, 0, v, hi, lo, n, some) >= some or _room(places, 1, v, hi, lo, n, some) >= some:
                        found[g, v, hi] = lo
                        break
    return found


@inlined
def _room(places: Array, r: int, v: int, hi: int, lo: int, n: int, some: int) -> float:
    room: float = places[v, hi, lo, 3 * r] - n * places[v, hi, lo, 3 * r + 1] - some * places[v, hi, lo, 3 * r + 2]
    return room


@compiled
def reach(t: Tables, loads: Given, end: End, first: Index, layers: Index) -> Index:
    """[G, V, hi]: the first of `layers` from which a stage that ends there can do its own work within T, and not before
    `first` [G, V, hi]; L + 1 if there is none."""
    V, L = len(t.at), t.least.shape[1] - 1
    found = np.full((len(loads.low), V, L + 1), L + 1)
    start, done = np.zeros(len(layers)), np.zeros(len(layers))
    for g in range(len(loads.low)):
        i, m, q = loads.size[g], loads.m[g], loads.q[g]
        part = 0.0 if m == 0 else t.parts[i, 0] if q > 0 else 1.0
        for v in range(V):
            if not t.usable[i, v]:
                continue
            for j in range(1, len(layers)):
                at = layers[j]
                done[j] = m * t.times[i, v, at, 0, 0] + q * t.times[i, v, at, 0, 4] + t.places[v, at, 0, 6]
                start[j] = done[j] - part * t.least[i, at] - m * 2 * t.overhead
            at = 0
            for j in range(1, len(layers)):
                hi, last = layers[j], done[j] - end.T * (1 + 1e-12)
                while at < j and start[at] < last + (end.sums[v, hi, 0] if at == 0 else end.shortest):
                    at += 1
                lo = at
                while lo < j and layers[lo] < first[g, v, hi]:
                    lo += 1
                if lo < j:
                    found[g, v, hi] = layers[lo]
    return found


@compiled
def to_go(stages: Index, price: Array, layers: Index) -> Array:
    """The least price of layers [0, hi) or more, [G, L + 2], with stages as `reach` has them; infinite at L + 1."""
    G, V, L = stages.shape[0], stages.shape[1], stages.shape[2] - 1
    least = np.full((G, L + 2), np.inf)
    for g in range(G):
        least[g, 0] = 0.0
        for hi in layers[1:]:
            found = np.inf
            for v in range(V):
                found = min(found, least[g, stages[g, v, hi]] + price[v])
            least[g, hi] = found
            for lo in range(hi - 1, 0, -1):
                if least[g, lo] <= found:
                    break
                least[g, lo] = found
    return least


@inlined
def _wait(first: float, last: float, forward: float, backward: float, depth: int, m: int) -> float:
    """Idle seconds of a stage while its first and its last micro-batch are downstream for so long."""
    begin = max(first - (depth - 1) * forward, 0.0)
    end = max(last - (depth - 1) * backward, 0.0)
    return begin + end if depth < m else max(begin, end)


@inlined
def _mask(masked: bool, K: int, rows: Index, j: int) -> int:
    """Which classes are among those that a row uses, as an index of `links`; 0 for none."""
    found = 0
    for k in range(K):
        if rows[j, USED + k] > 0:
            found |= 1 << k if masked else 1
    return found


@inlined
def _bound(tables: tuple[Array, Array, Array, Array, Array, Array], limits: tuple[float, float],
           depths: tuple[Index, bool, float], load: tuple[int, int, int, int, int], behind: tuple[float, float, float],
           mask: int, v: int, k: int, hi: int, lo: int, place: int) -> tuple[float, float, float, bool]:  # fmt: skip
    """u, g of the first micro-batches and of the whole load, of a row with a stage [lo, hi) of kind v before it, `place` stages
    from the end; and whether it may end in time. `behind` are those of the row, and `mask` its classes."""
    times, places, links, once, parts, sums = tables
    T, least_sum = limits
    forwards, gpipe, overhead = depths
    i, n, b, m, q = load
    M, some = m + (q > 0), min(n, b)
    hop, wire = links[i, k, mask, hi, 0], links[i, k, mask, hi, 1]
    away = behind[0] + hop
    part = q * parts[i, 1] if q > 0 else 1.0  # of u, that the last micro-batch takes
    work, forward, rest = times[i, v, hi, lo, 0], times[i, v, hi, lo, 1], q * times[i, v, hi, lo, 4]
    own = own_whole = through = np.inf
    for r in range(2):
        room, depth = _room(places, r, v, hi, lo, n, some), 0
        for x in forwards:
            d = min(M, x * (place - 1) + 1)
            depth = max(depth, d if room >= (n if d == M else d * b) else 0)
        flat = gpipe and room >= n
        if depth == 0 and not flat:
            continue
        again = (forward - overhead) * r
        f, backward = times[i, v, hi, lo, 2], times[i, v, hi, lo, 3] + again
        idle, last = (away, part * away) if flat or m == 0 else (np.inf, np.inf)
        if depth > 0 and m > 0:
            idle = min(idle, _wait(away, away, f, backward, depth, m))
            last = min(last, _wait(away, part * away, f, backward, depth, M))
        own = min(own, m * (work + again) + idle)
        own_whole = min(own_whole, m * (work + again) + rest + last)
        through = min(through, work + again)
        if room >= n:
            break
    first = least = 0.0
    if m > 0:
        first, least = max(own, through + max(hop + behind[1], (m - 1) * wire + away)), once[i, lo]
    if q == 0:
        whole = max(own_whole, through + hop + behind[2])
    elif m == 0:
        whole = max(own_whole, rest + behind[2])
    else:
        whole = max(own_whole, forward + q * parts[i, 2] * (through - forward) + hop / 2 + behind[2])
    most, before = max(first, whole), least * parts[i, 0]
    done = max(first + least, whole + before) if q > 0 else most + least
    after = places[v, hi, lo, 6]
    shortest = sums[v, hi, 0] if lo == 0 else least_sum
    on_time = done + after + shortest <= T and most + before + sums[v, hi, lo] + after <= T
    return through + away, first, whole, on_time and through < np.inf


@inlined
def _copy(rows: NDArray[Any], j: int, to: NDArray[Any], at: int) -> None:
    for x in range(rows.shape[1]):
        to[at, x] = rows[j, x]


@compiled
def _more(values: NDArray[Any]) -> NDArray[Any]:
    """The same rows, and room for as many again."""
    found = np.empty((2 * values.shape[0], values.shape[1]), values.dtype)
    for j in range(values.shape[0]):
        _copy(values, j, found, j)
    return found


@compiled
def extended(t: Tables, loads: Given, end: End, stages: Index, allowed: Flags, price: Array, least: Array, limit: Index,
             rows: Index, values: Array, place: int) -> tuple[Index, Array, int]:  # fmt: skip
    """Rows with a stage more, of no more devices than `limit`, that T and prices leave; and how many were looked at. `price` [V]
    is that of a stage; of each row `values` are u, both g, and the price so far; layers cost at least `least` as `to_go` has it.
    Stages are as `reach` has them, and begin at `allowed` layers."""
    V, K = len(t.at), len(t.counts)
    kinds, degrees, highs = t.at, t.degree, loads.high
    tables, limits = (t.times, t.places, t.links, t.least, t.parts, end.sums), (end.T, end.shortest)
    depths = t.forwards, t.gpipe, t.overhead
    found, bounds = np.empty((FIRST + 2 * len(rows), USED + K), np.int64), np.empty((FIRST + 2 * len(rows), 4))
    n = seen = 0
    for j in range(len(rows)):
        g, hi, mask = rows[j, LOAD], rows[j, LO], _mask(t.masked, K, rows, j)
        load, high = (loads.size[g], loads.low[g], loads.b[g], loads.m[g], loads.q[g]), highs[g]
        behind = values[j, 0], values[j, 1], values[j, 2]
        for v in range(V):
            k = kinds[v]
            if rows[j, USED + k] + degrees[v] > limit[k]:
                continue
            paid = values[j, 3] + price[v]
            for lo in range(stages[g, v, hi], hi):
                if not paid + least[g, lo] < high:
                    break
                if not allowed[lo]:
                    continue
                seen += 1
                u, first, whole, on_time = _bound(tables, limits, depths, load, behind, mask, v, k, hi, lo, place)
                if not on_time:
                    continue
                if n == len(found):
                    found, bounds = _more(found), _more(bounds)
                _copy(rows, j, found, n)
                found[n, LO], found[n, 2], found[n, 3] = lo, j, v
                found[n, USED + k] += degrees[v]
                bounds[n, 0], bounds[n, 1], bounds[n, 2], bounds[n, 3] = u, first, whole, paid
                n += 1
    return found[:n], bounds[:n], seen


@inlined
def _same(rows: Index, j: int, others: Index, i: int) -> bool:
    """Whether first layer and devices are the same."""
    same: bool = rows[j, LO] == others[i, LO]
    for x in range(USED, rows.shape[1]):
        same &= rows[j, x] == others[i, x]
    return same


@compiled
def _slot(table: Index, kept: Index, since: int, rows: Index, j: int) -> int:
    """Where a hash table of rows kept has the one like row j, or is to have it: an entry below `since` is empty."""
    code = rows[j, LO]
    for x in range(USED, rows.shape[1]):
        code = code * 1_000_003 + rows[j, x]
    at: int = (code ^ (code >> 17)) & (len(table) - 1)
    while table[at] >= since and not _same(kept, table[at], rows, j):
        at = (at + 1) & (len(table) - 1)
    return at


@compiled
def _grown(table: Index, kept: Index, since: int, n: int) -> Index:
    """The hash table of rows from `since` to n, large enough for another."""
    if 2 * (n - since) < len(table):
        return table
    found = np.full(2 * len(table), -1)
    for j in range(since, n):
        found[_slot(found, kept, since, kept, j)] = j
    return found


@compiled
def _merged(rows: Index, values: Array) -> int:
    """Leave, as the first of them, one row for each load, first layer and devices, with the least of each value; their number.
    Rows of a load are one after the other, as they are here on return."""
    table, since, n = np.full(4 * FIRST, -1), 0, 0
    for j in range(len(rows)):
        if rows[j, LO] == 0:
            continue
        if n > since and rows[j, LOAD] != rows[n - 1, LOAD]:
            since = n  # which empties the table
        at = _slot(table, rows, since, rows, j)
        old = table[at]
        if old >= since:
            for x in range(4):
                values[old, x] = min(values[old, x], values[j, x])
            continue
        table[at] = n
        _copy(rows, j, rows, n)
        _copy(values, j, values, n)
        n += 1
        table = _grown(table, rows, since, n)
    return n


@compiled
def _fewer(rows: Index, values: Array, loads: Given, least: Array, most: float) -> int:
    """Leave, as the first of them, about so many rows with the most room to their price; their number."""
    n = len(rows)
    if n <= most:
        return n
    part = np.empty(n)
    for j in range(n):
        part[j] = (values[j, 3] + least[rows[j, LOAD], rows[j, LO]]) / loads.high[rows[j, LOAD]]
    low, high = part.min(), part.max()
    for _ in range(50):
        middle, count = (low + high) / 2, 0
        for x in part:
            count += x <= middle
        low, high = (middle, high) if count < most else (low, middle)
    n = 0
    for j in range(len(rows)):
        if part[j] <= high:
            _copy(rows, j, rows, n)
            _copy(values, j, values, n)
            n += 1
    return n


@compiled
def search(t: Tables, loads: Given, end: End, stages: Index, allowed: Flags, price: Array, least: Array,
           most: tuple[float, float, float]) -> Found:  # fmt: skip
    """Compositions of pipelines that could be worth more than their price; otherwise as for `extended`. Ends once it has so many
    compositions, or has seen more candidates, and keeps so many rows: `most`."""
    G, L, K = len(loads.low), t.least.shape[1] - 1, len(t.counts)
    rows, values = np.zeros((G, USED + K), np.int64), np.zeros((G, 4))
    for g in range(G):
        rows[g, LOAD], rows[g, LO] = g, L
    found, samples, done = np.empty((FIRST, USED + K), np.int64), np.empty((FIRST, 2), np.int64), 0
    table = np.full(4 * FIRST, -1)
    hit, complete, seen = np.zeros(G, np.bool_), True, 0
    for place in range(1, L + 1):
        if len(rows) == 0 or done >= most[0] or seen > most[1]:
            break
        rows, values, more = extended(t, loads, end, stages, allowed, price, least, t.counts, rows, values, place)
        seen += more
        for j in range(len(rows)):
            if rows[j, LO] > 0:
                continue
            g = rows[j, LOAD]
            hit[g] = True
            at = _slot(table, found, 0, rows, j)
            if table[at] < 0:
                if done == len(found):
                    found, samples = _more(found), _more(samples)
                table[at] = done
                _copy(rows, j, found, done)
                samples[done, 0] = 0
                done += 1
                table = _grown(table, found, 0, done)
                at = _slot(table, found, 0, rows, j)
            if loads.high[g] > samples[table[at], 0]:
                samples[table[at], 0], samples[table[at], 1] = loads.high[g], loads.size[g]
        n = _merged(rows, values)
        kept = _fewer(rows[:n], values[:n], loads, least, most[2])
        complete &= kept == n
        rows, values = rows[:kept], values[:kept]
    complete &= len(rows) == 0
    return Found(found[:done, USED:].copy(), samples[:done, 0].copy(), samples[:done, 1].copy(), hit, complete, seen)


@cache
def ready() -> None:
    """Compile everything, or read it from disk, by a search without loads: outside of any time limit."""
    one = np.ones(1, np.int64)
    links, flag = np.zeros((1, 1, 2, 2, 2)), np.ones((1, 1), np.bool_)
    tables = Tables(np.zeros((1, 1, 2, 2, 5)), np.zeros((1, 2, 2, 7)), links, np.zeros((1, 2)), np.zeros((1, 3)), flag,
                    one, 0 * one, one, one, True, True, 0.0)  # fmt: skip
    loads, end, layers, price = Given(*[one[:0]] * 6), End(1.0, np.zeros((1, 2, 2)), 0.0), np.arange(2), np.ones(1)
    stages = reach(tables, loads, end, held(tables, loads), layers)
    least = to_go(stages, price, layers)
    search(tables, loads, end, stages, flag[0], price, least, (1.0, 1.0, 1.0))
    extended(tables, loads, end, stages, flag[0], price, least, one, np.zeros((0, USED + 1), np.int64), np.zeros((0, 4)), 1)
