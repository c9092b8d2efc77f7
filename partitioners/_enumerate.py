"""The loops of the counted planner, compiled by numba at their first use and then kept on disk: which stages can end where
(`held`, `reach`), what layers must cost (`to_go`), the enumeration of pipelines (`search`). `_columns` says what they compute,
and why it is right.

They are all in one file: of what numba has on disk it only compares the file of the function itself with what is there now."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners._compiled import compiled, get_ready, inlined

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Flags = NDArray[np.bool_]

ROOM = 64  # rows that arrays have room for at first
LOAD, LO, USED = 0, 1, 4  # columns of a row: load, first layer, the row and kind of stage it comes from, then devices used
EARLY = (3, 6)  # micro-batches, forwards of which from the first on and backwards of which from the last on are told apart
PAID, AWAY, AWAY_FEW, FIRST, WHOLE, SUMMED, CHAIN, SINCE = range(8)  # values of a row: price, u, both g, both y, and of these
VALUES = SINCE + 2 * len(EARLY)
SLACKS, WIDTH = 48, 0.0035  # how much longer than the least layers may take: multiples of a part of a step, the last: any


class Tables(NamedTuple):
    """Those of `Stages`: `times` [sizes, V, hi, lo, 4] are work, forward, longest forward and backward; `places` [V, hi, lo, 7]
    room, boundary and transient, without and with recompute, and the optimizer; `smaller` [knots, V, hi, lo, 2]; `links`
    [sizes, K, masks, hi, 2] hop and wire; `least` [sizes, L + 1] backward. The last layers first, since searches go on from
    these. `forwards` are those of the families allowed; whether `gpipe` is one, too."""

    times: Array
    places: Array
    links: Array
    smaller: Array
    least: Array
    shorter: Array
    usable: Flags
    at: Index
    degree: Index
    forwards: Index
    gpipe: bool
    masked: bool
    overhead: float


class Given(NamedTuple):
    """[G] loads: index of the micro-batch size b; the fewest and the most samples; b; of the fewest samples m full micro-batches,
    and q samples of the last one, which are so far (`part`) from one of the knots to the next. And the least time [L + 1, 2] of
    the first forward and of the last backward through layers [0, lo)."""

    size: Index
    low: Index
    high: Index
    b: Index
    m: Index
    q: Index
    knot: Index
    part: Array
    once: Array


class End(NamedTuple):
    """When a step is to end; gradient sums of stages [V, hi, lo], and the least of any first stage. What is known of those that
    wait for others (`_chains`): least sums of layers [hi, lo]; the first layer of the chain below hi, L + 1 if that is not known;
    and the least sums of that chain."""

    T: float
    sums: Array
    shortest: float
    seconds: Array
    chain: Index
    below: Array


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
    """[G, V, hi]: the first lo from which a stage fits in memory with the least in flight that it may have (`_flying`); L + 1 if
    none does."""
    places, V, L = t.places, len(t.at), t.least.shape[1] - 1
    found = np.full((len(loads.low), V, L + 1), L + 1)
    for g in range(len(loads.low)):
        n, some, last, other = loads.low[g], min(loads.low[g], loads.b[g]), _flying(t, loads, g, 0), _flying(t, loads, g, 1)
        for v in range(V):
            for hi in range(L + 1):
                need = last if hi == L else other
                for lo in range(hi):
                    if _room(places, 0, v, hi, lo, n, some) >= need or _room(places, 1, v, hi, lo, n, some) >= need:
                        found[g, v, hi] = lo
                        break
    return found


@inlined
def _room(places: Array, r: int, v: int, hi: int, lo: int, n: int, some: int) -> float:
    room: float = places[v, hi, lo, 3 * r] - n * places[v, hi, lo, 3 * r + 1] - some * places[v, hi, lo, 3 * r + 2]
    return room


@compiled
def _flying(t: Tables, loads: Given, g: int, after: int) -> int:
    """The fewest samples that a stage with so many stages after it, or more, has in flight."""
    n, b = loads.low[g], loads.b[g]
    fewest: int = n
    for forwards in t.forwards:
        depth = forwards * after + 1
        fewest = min(fewest, depth * b if depth < loads.m[g] + (loads.q[g] > 0) else n)
    return fewest


@inlined
def _few(smaller: Array, knot: int, part: float, v: int, hi: int, lo: int, side: int) -> float:
    """Seconds of a forward (side 0) or backward (1) of a last micro-batch."""
    at: float = smaller[knot, v, hi, lo, side]
    found: float = at + part * (smaller[knot + 1, v, hi, lo, side] - at)
    return found


@inlined
def _chained(end: End, v: int, hi: int, lo: int) -> float:
    """Least sums of a stage, and of those that wait for them."""
    sums: float = end.sums[v, hi, lo] + (end.below[lo] if end.sums[v, hi, lo] > 0 else 0.0)
    return sums


@compiled
def reach(t: Tables, loads: Given, end: End, held: Index, row: Index, layers: Index, begin: Index) -> Index:
    """[G, V, hi]: the first of `layers` from which a stage that ends there can do its own work within T, and fits in memory
    (`held`, of which each load has a `row`), and begins no sooner than it may (`begin` [V, hi]); L + 1 if there is none. A load
    of more samples than the one before can do no more."""
    V, L = len(t.at), t.least.shape[1] - 1
    found, before = np.full((len(loads.low), V, L + 1), L + 1), np.zeros((V, len(layers)), np.int64)
    for g in range(len(loads.low)):
        if g > 0 and (loads.size[g] != loads.size[g - 1] or loads.low[g] < loads.low[g - 1]):
            before[:] = 0
        i, m, q, knot, part = loads.size[g], loads.m[g], loads.q[g], loads.knot[g], loads.part[g]
        n, some, last, other = loads.low[g], min(loads.low[g], loads.b[g]), _flying(t, loads, g, 0), _flying(t, loads, g, 1)
        for v in range(V):
            if not t.usable[i, v]:
                continue
            at = 0  # stages from before there that end later cannot do their own work, either
            for j in range(1, len(layers)):
                hi = layers[j]
                at, first, need = max(at, before[v, j]), max(held[row[g], v, hi], begin[v, hi]), last if hi == L else other
                a = at
                while a < j:
                    lo = layers[a]
                    own = m * t.times[i, v, hi, lo, 0] + t.places[v, hi, lo, 6] + loads.once[g, lo, 0]
                    again = m * (t.times[i, v, hi, lo, 1] - t.overhead)
                    if q > 0:
                        few = _few(t.smaller, knot, part, v, hi, lo, 0)
                        own, again = own + few + _few(t.smaller, knot, part, v, hi, lo, 1), again + few - t.overhead
                    own += max(_chained(end, v, hi, lo), loads.once[g, lo, 1] + (0.0 if lo == 0 else end.shortest))
                    again = again if _room(t.places, 0, v, hi, lo, n, some) < need else 0.0
                    if own > end.T * (1 + 1e-12):
                        at += at == a
                    elif lo >= first and own + again <= end.T * (1 + 1e-12):
                        found[g, v, hi] = lo
                        break
                    a += 1
                before[v, j] = at
    return found


@inlined
def _slack(end: End, whole: float, once: Array, lo: int, most: int) -> int:
    """How much longer than the least layers [0, lo) may take, as an index of `to_go`, at most this one."""
    left = (end.T - end.shortest - whole - once[lo, 0] - once[lo, 1]) / (WIDTH * end.T)
    return int(min(max(left, 0.0), most))


@inlined
def _rest(stages: Index, price: Array, g: int, layers: Index, rest: Array) -> None:
    """The least price [L + 1] of layers [lo, L), however long they take. It does not grow with lo: a stage may begin at any later
    layer, too, as `reach` has it."""
    L = len(rest) - 1
    rest[:] = np.inf
    rest[L] = 0.0
    for j in range(len(layers) - 1, 0, -1):
        hi = layers[j]
        for v in range(len(price)):
            paid = rest[hi] + price[v]
            for lo in range(stages[g, v, hi], hi):
                if rest[lo] <= paid:
                    break
                rest[lo] = paid


@compiled
def to_go(t: Tables, loads: Given, end: End, stages: Index, price: Array, fixed: float, layers: Index,
          slacks: int) -> tuple[Array, Flags]:  # fmt: skip
    """The least price of layers [0, hi) and a `fixed` one, [G, L + 1, slacks], with stages as `reach` has them, where the first
    forward and the last backward through them take no longer than the least there is (`once`) and so many times WIDTH · T; the
    last of these: however long. And which loads may be worth more than their price; of others all is infinite."""
    G, V, L, most, width = len(loads.low), len(t.at), t.least.shape[1] - 1, slacks - 1, WIDTH * end.T
    least, alive, rest = np.full((G, L + 1, slacks), np.inf), np.zeros(G, np.bool_), np.zeros(L + 1)
    for g in range(G):
        _rest(stages, price, g, layers, rest)
        if not fixed + rest[0] < loads.high[g]:
            continue
        i, q, full, once = loads.size[g], loads.q[g], loads.m[g] > 0, loads.once[g]
        n, some, last, other = loads.low[g], min(loads.low[g], loads.b[g]), _flying(t, loads, g, 0), _flying(t, loads, g, 1)
        least[g, 0] = fixed
        for j in range(1, len(layers)):
            hi = layers[j]
            for v in range(V):
                hop = t.links[i, t.at[v], -1, hi, 0] if hi < L else 0.0
                hops = ((hop if full else hop * q * t.shorter[i]) + (hop * q * t.shorter[i] if q > 0 else hop)) / 2
                for a in range(j - 1, -1, -1):
                    lo = layers[a]
                    if lo < stages[g, v, hi]:
                        break
                    if not least[g, lo, most] + price[v] + rest[hi] < loads.high[g]:
                        continue
                    work, knot, part = t.times[i, v, hi, lo, 0], loads.knot[g], loads.part[g]
                    own = loads.m[g] * work + t.places[v, hi, lo, 6] + once[lo, 0]
                    there, back, again = t.times[i, v, hi, lo, 1], work - t.times[i, v, hi, lo, 1], 0.0
                    if _room(t.places, 0, v, hi, lo, n, some) < (last if hi == L else other):
                        again = there - t.overhead
                        own += loads.m[g] * again
                    if q > 0:
                        few, back = _few(t.smaller, knot, part, v, hi, lo, 0), _few(t.smaller, knot, part, v, hi, lo, 1)
                        again = few - t.overhead if again > 0 else 0.0
                        there, own = there if full else few, own + few + back + again
                    late = own + _chained(end, v, hi, lo) > end.T * (1 + 1e-12)
                    own, back = own + once[lo, 1] + (end.sums[v, hi, 0] if lo == 0 else end.shortest), back + again
                    more = there + back + hops - (once[hi, 0] + once[hi, 1] - once[lo, 0] - once[lo, 1])
                    shift = int(min(max(more / width, 0.0), most))
                    room = int(min(max((end.T * (1 + 1e-12) - own) / width, 0.0), most))
                    before, to, cost = least[g, lo], least[g, hi], np.inf if late else price[v]
                    for x in range(min(most - shift, room + 1)):
                        paid = before[x] + cost
                        to[x + shift] = paid if paid < to[x + shift] else to[x + shift]
                    paid = before[room] + cost
                    for x in range(min(room + shift, most), most + 1):
                        to[x] = paid if paid < to[x] else to[x]
        alive[g] = least[g, L, _slack(end, 0.0, once, L, most)] < loads.high[g]
    return least, alive


@inlined
def _mask(masked: bool, K: int, rows: Index, j: int) -> int:
    """Which classes are among those that a row uses, as an index of `links`; 0 for none."""
    found = 0
    for k in range(K):
        if rows[j, USED + k] > 0:
            found |= 1 << k if masked else 1
    return found


@inlined
def _summed(end_of: End, rows: Array, j: int, v: int, hi: int, lo: int, shift: float, ready: float, to: Array, at: int) -> float:
    """The end of all sums of row j with a stage before it that begins so much sooner and then has its last backward ready,
    and of those that wait for them."""
    summed, chain = shift + rows[j, SUMMED], shift + rows[j, CHAIN]
    if end_of.chain[hi] <= lo:
        chain += end_of.seconds[hi, lo]
    else:
        summed, chain = max(summed, chain), 0.0
    if end_of.sums[v, hi, lo] > 0:
        chain = max(chain, ready + end_of.sums[v, hi, lo])
    else:
        summed = max(summed, ready)
    to[at, SUMMED], to[at, CHAIN] = summed, chain
    found: float = max(summed, chain + end_of.below[lo])
    return found


@inlined
def _bound(tables: tuple[Array, Array, Array, Array, Array], end_of: End,
           depths: tuple[Index, bool, float], load: tuple[int, int, int, int, int], last: tuple[int, float, Array, Array],
           rows: Array, j: int, mask: int, v: int, k: int, hi: int, lo: int, place: int, to: Array, at: int) -> bool:  # fmt: skip
    """Values of row j with a stage [lo, hi) of kind v before it, `place` stages from the end, as row `at` of others: the least
    over families of depths. Whether it may end in time. `mask` are the classes of row j."""
    times, smaller, places, links, shorter = tables
    forwards, gpipe, overhead = depths
    i, n, b, m, q = load
    knot, fraction, once, full = last
    M, some = m + (q > 0), min(n, b)
    hop, wire = links[i, k, mask, hi, 0], links[i, k, mask, hi, 1]
    work, forward = times[i, v, hi, lo, 0], times[i, v, hi, lo, 1]
    hop_few, forward_few, backward_few = hop, forward, work - forward  # of the last micro-batch
    if q > 0:
        hop_few = hop * q * shorter[i]
        forward_few, backward_few = _few(smaller, knot, fraction, v, hi, lo, 0), _few(smaller, knot, fraction, v, hi, lo, 1)
    away, away_few = rows[j, AWAY] + hop, rows[j, AWAY_FEW] + hop_few
    f, b_longest = times[i, v, hi, lo, 2], times[i, v, hi, lo, 3]
    plain, again = _room(places, 0, v, hi, lo, n, some), _room(places, 1, v, hi, lo, n, some)
    for x in range(AWAY, VALUES):
        to[at, x] = np.inf
    before = 0
    for x in range(len(forwards) + gpipe):
        flat = x == len(forwards)
        d = M if flat else min(M, forwards[x] * (place - 1) + 1)
        need = n if d == M else d * b
        if d == before or max(plain, again) < need:
            continue
        before, more, more_few = d, 0.0, 0.0
        if plain < need:
            more, more_few = forward - overhead, forward_few - overhead
        through, backward, longest = work + more, work + more - forward, b_longest + more
        few = backward_few + more_few
        rest = forward_few + few if q > 0 else 0.0
        inside = forward_few if q > 0 and d > 1 else 0.0  # of the last one, before the last backward of a full one
        first, whole = 0.0, rest + hop_few + rows[j, WHOLE]
        if m > 0:
            begin = max(away - (d - 1) * f, 0.0)
            end, end_few = max(away - (d - 1) * longest, 0.0), max(away_few - (d - 1) * longest, 0.0)
            idle = begin + max(end, inside) if d < m else max(begin + inside, end)
            idle_whole = begin + end_few if d < M else max(begin, end_few)
            if flat:
                idle, idle_whole = max(away, away_few + inside), max(away - inside, away_few)
            first = max(m * through + idle, through + max(hop + rows[j, FIRST], (m - 1) * wire + away))
            since = until = skip_f = skip_b = 0.0
            for y in range(SINCE + len(EARLY) - 1, SINCE - 1, -1):
                z, e = y + len(EARLY), EARLY[y - SINCE]
                if e >= m:
                    to[at, y] = to[at, z] = 0.0
                    continue
                over = max(e - d + 1, 0)
                own_f, own_b = e * forward + over * backward, e * backward + over * forward
                gap, gap_few = begin + (inside if e <= d - 2 else 0.0), end_few
                if flat:
                    gap, gap_few = idle, idle_whole
                since = max(since + skip_f - own_f, m * through + rest - own_f + gap_few)
                since = max(since, forward + few + (hop + hop_few) / 2 + rows[j, y])
                until = max(until + skip_b - own_b, m * through - own_b + gap, through + hop + rows[j, z])
                to[at, y], to[at, z] = min(to[at, y], since), min(to[at, z], until)
                skip_f, skip_b = own_f, own_b
            first = max(first, until + skip_b)
            whole = max(m * through + rest + idle_whole, forward + few + (hop + hop_few) / 2 + rows[j, WHOLE], since + skip_f)
            whole = max(whole, first + rest - inside)
            first = first if q > 0 else whole
        to[at, FIRST], to[at, WHOLE] = min(to[at, FIRST], first), min(to[at, WHOLE], whole)
        to[at, AWAY] = min(to[at, AWAY], through + away)
        to[at, AWAY_FEW] = min(to[at, AWAY_FEW], forward_few + few + away_few)
    first, whole = to[at, FIRST], to[at, WHOLE]
    shift = forward + hop / 2 if m > 0 else forward_few + hop_few / 2
    summed, after = _summed(end_of, rows, j, v, hi, lo, shift, max(first, whole), to, at), places[v, hi, lo, 6]
    back = max(whole + once[lo, 1], first + full[lo] if m > 0 else 0.0)
    shortest = end_of.sums[v, hi, 0] if lo == 0 else end_of.shortest
    on_time: bool = once[lo, 0] + max(back + shortest, summed) + after <= end_of.T
    return on_time


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
             rows: Index, values: Array, place: int, most: float) -> tuple[Index, Array, int]:  # fmt: skip
    """Rows with a stage more, of no more devices than `limit` [G, K], that T and prices leave; and how many were looked at: it
    ends once these are more than `most`. `price` [V] is that of a stage; `values` of each row as above; layers cost at least
    `least` as `to_go` has it. Stages are as `reach` has them, and begin at `allowed` layers."""
    V, K = len(t.at), limit.shape[1]
    kinds, degrees, highs, slacks = t.at, t.degree, loads.high, least.shape[2] - 1
    tables = t.times, t.smaller, t.places, t.links, t.shorter
    depths = t.forwards, t.gpipe, t.overhead
    found, bounds = np.empty((ROOM + 2 * len(rows), USED + K), np.int64), np.empty((ROOM + 2 * len(rows), VALUES))
    n = seen = 0
    for j in range(len(rows)):
        if seen > most:
            break
        g, hi, mask = rows[j, LOAD], rows[j, LO], _mask(t.masked, K, rows, j)
        load, high = (loads.size[g], loads.low[g], loads.b[g], loads.m[g], loads.q[g]), highs[g]
        last = loads.knot[g], loads.part[g], loads.once[g], t.least[loads.size[g]]
        slack = _slack(end, values[j, WHOLE], last[2], hi, slacks)
        for v in range(V):
            k = kinds[v]
            if rows[j, USED + k] + degrees[v] > limit[g, k]:
                continue
            paid = values[j, PAID] + price[v]
            for lo in range(stages[g, v, hi], hi):
                if not allowed[lo] or not paid + least[g, lo, slack] < high:
                    continue
                seen += 1
                if n == len(found):
                    found, bounds = _more(found), _more(bounds)
                if not _bound(tables, end, depths, load, last, values, j, mask, v, k, hi, lo, place, bounds, n):
                    continue
                if not paid + least[g, lo, _slack(end, bounds[n, WHOLE], last[2], lo, slacks)] < high:
                    continue
                _copy(rows, j, found, n)
                found[n, LO], found[n, 2], found[n, 3] = lo, j, v
                found[n, USED + k] += degrees[v]
                bounds[n, PAID] = paid
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
    table, since, n = np.full(4 * ROOM, -1), 0, 0
    for j in range(len(rows)):
        if rows[j, LO] == 0:
            continue
        if n > since and rows[j, LOAD] != rows[n - 1, LOAD]:
            since = n  # which empties the table
        at = _slot(table, rows, since, rows, j)
        old = table[at]
        if old >= since:
            for x in range(VALUES):
                values[old, x] = min(values[old, x], values[j, x])
            continue
        table[at] = n
        _copy(rows, j, rows, n)
        _copy(values, j, values, n)
        n += 1
        table = _grown(table, rows, since, n)
    return n


@compiled
def _fewer(rows: Index, values: Array, loads: Given, end: End, least: Array, most: float) -> int:
    """Leave, as the first of them, about so many rows with the most room to their price; their number."""
    n = len(rows)
    if n <= most:
        return n
    part = np.empty(n)
    for j in range(n):
        g, lo = rows[j, LOAD], rows[j, LO]
        slack = _slack(end, values[j, WHOLE], loads.once[g], lo, least.shape[2] - 1)
        part[j] = (values[j, PAID] + least[g, lo, slack]) / loads.high[g]
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
def search(t: Tables, loads: Given, end: End, stages: Index, allowed: Flags, limit: Index, price: Array, least: Array,
           most: tuple[float, float, float]) -> Found:  # fmt: skip
    """Compositions of pipelines that could be worth more than their price; otherwise as for `extended`. Ends once it has so many
    compositions, or has seen more candidates, and keeps so many rows: `most`."""
    G, L, K = len(loads.low), t.least.shape[1] - 1, limit.shape[1]
    rows, values = np.zeros((G, USED + K), np.int64), np.zeros((G, VALUES))
    for g in range(G):
        rows[g, LOAD], rows[g, LO] = g, L
    found, samples, done = np.empty((ROOM, USED + K), np.int64), np.empty((ROOM, 2), np.int64), 0
    table = np.full(4 * ROOM, -1)
    hit, complete, seen = np.zeros(G, np.bool_), True, 0
    for place in range(1, L + 1):
        if len(rows) == 0 or done >= most[0] or seen > most[1]:
            break
        left = most[1] - seen
        rows, values, more = extended(t, loads, end, stages, allowed, price, least, limit, rows, values, place, left)
        seen, complete = seen + more, complete and more <= left
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
        kept = _fewer(rows[:n], values[:n], loads, end, least, most[2])
        complete &= kept == n
        rows, values = rows[:kept], values[:kept]
    complete &= len(rows) == 0
    return Found(found[:done, USED:].copy(), samples[:done, 0].copy(), samples[:done, 1].copy(), hit, complete, seen)


@cache
def ready() -> None:
    """Compile everything, or read it from disk: outside of any time limit."""
    get_ready(_search_nothing)


def _search_nothing() -> None:
    """A search without loads."""
    one, layers, flag, zeros = np.ones(1, np.int64), np.arange(2), np.ones((1, 1), np.bool_), np.zeros
    none, few, price = one[:0], zeros((1, 1, 2, 2, 2)), zeros(1)
    tables = Tables(zeros((1, 1, 2, 2, 4)), zeros((1, 2, 2, 7)), few, few, zeros((1, 2)), price, flag, 0 * one, one, one,
                    True, True, 0.0)  # fmt: skip
    loads = Given(none, none, none, none, none, none, none, zeros(0), zeros((0, 2, 2)))
    end = End(1.0, zeros((1, 2, 2)), 0.0, zeros((2, 2)), layers, price)
    stages = reach(tables, loads, end, held(tables, loads), none, layers, np.zeros((1, 2), np.int64))
    least, _ = to_go(tables, loads, end, stages, price, 0.0, layers, 1)
    limit = np.ones((1, 1), np.int64)
    search(tables, loads, end, stages, flag[0], limit, price, least, (1.0, 1.0, 1.0))
    extended(tables, loads, end, stages, flag[0], price, least, limit, zeros((0, USED + 1), np.int64), zeros((0, VALUES)), 1,
             1.0)  # fmt: skip
