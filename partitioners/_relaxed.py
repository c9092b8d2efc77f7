"""The cheapest relaxed pipeline, compiled: for so many samples within T, at a price for each device. See `_lower`."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners._compiled import compiled, get_ready, inlined

Array = NDArray[np.float64]
Index = NDArray[np.int64]
LABELS = 64  # of a first layer, a type and a number of devices on a node, by the time that they leave
NODE = 8  # devices on a node that are counted; on larger ones there may be any number
CALL = 25_000  # joined labels that take as long as all else of one call


Places = NDArray[np.int32]
Space = tuple[Array, Array, Places, Array, Array, Places]


class Load(NamedTuple):
    """What does not depend on T and prices. V kinds of stage on K types, L layers; seconds [V, L + 1] of all layers before each.

    `work` of all micro-batches, `again` more under recompute, `once` the first forward and the last backward, `once_again` more
    under recompute, `ahead` the first forward; `work_more` and `once_more` of each stage. `hop` both ways of a transfer, `wire`
    what all take one way, between nodes [L + 1] and inside of one [K, K, L + 1]. `room` [2, V, L + 1, L + 1]: most samples in
    flight without and with recompute."""

    work: Array
    again: Array
    once: Array
    once_again: Array
    ahead: Array
    work_more: float
    once_more: float
    hop: Array
    wire: Array
    hop_inside: Array
    wire_inside: Array
    room: Array
    b: int
    samples: int


class Seats(NamedTuple):
    """What a stage can be put on [W]: the number of its kind and of its type, how many devices of a node that takes, and how many
    other replicas have one there at least; its price; and the seconds of its gradient sums [W, L + 1, L + 1]. And how many
    devices a node has where there is one of a type [K]."""

    kind: Index
    at: Index
    devices: Index
    others: Index
    price: Array
    sums: Array
    node: Index


def space(L: int, K: int, most: int) -> Space:
    """Where labels are kept, with nodes of so many devices."""
    shape = L + 1, K, min(most, NODE), LABELS
    joined = L + 1, 1 + K * shape[2], LABELS
    return (np.zeros(shape), np.zeros(shape), np.zeros((*shape, 5), np.int32), np.zeros(joined), np.zeros(joined),
            np.zeros((*joined, 3), np.int32))  # fmt: skip


def cheapest(
    load: Load, seats: Seats, optimizer: Array, T: float, blocking: bool, gpipe: bool, labels: Space
) -> tuple[float, Index, int]:
    """The least price of a relaxed pipeline, infinite where there is none; its stages on each seat [W]; and the effort that it
    took, in labels joined."""
    used = np.zeros(len(seats.kind) + 1, dtype=np.int64)
    return _cheapest(*load, *seats, optimizer, T, blocking, gpipe, used, *labels), used[:-1], CALL + int(used[-1])


@cache
def ready() -> None:
    """Compile it, or read it from disk: outside of any time limit."""
    row, link, square, zero = np.ones((1, 2)), np.ones((1, 1, 2)), np.ones((1, 2, 2)), np.zeros(1, np.int64)
    load = Load(row, row, row, row, row, 0.0, 0.0, row[0], row[0], link, link, np.ones((2, 1, 2, 2)), 1, 1)
    seats = Seats(zero, zero, zero + 1, zero, np.ones(1), square, zero + 1)
    get_ready(lambda: cheapest(load, seats, square, 1.0, False, False, space(1, 1, 1)))


@compiled
def _before(seconds: Array) -> Array:
    """The least of any kinds for all layers before each [L + 1]."""
    found = np.zeros(seconds.shape[1])
    for l in range(1, seconds.shape[1]):  # noqa: E741
        found[l] = found[l - 1] + (seconds[:, l] - seconds[:, l - 1]).min()
    return found


@compiled
def _nearest(between: Array, inside: Array) -> Array:
    """The least from any type to each at each boundary [K, L + 1]; 0 at both ends."""
    found = np.zeros(inside.shape[1:])
    for i in range(inside.shape[1]):
        for l in range(1, inside.shape[2] - 1):  # noqa: E741
            found[i, l] = min(between[l], inside[:, i, l].min())
    return found


@inlined
def _put(lo: int, i: int, c: int, left: float, total: float, scale: float, v: int, hi: int, j: int, d: int, n: int, cost: Array,
         slack: Array, origin: Places) -> None:  # fmt: skip
    """One more label of a type and so many devices on its node, with so much more room than the layers before need: of those with
    about as much the least cost and the most room are kept, apart. Those of whole pipelines are all at (0, 0, 0, 0)."""
    if lo > 0:
        k, c = min(LABELS - 1, int(left * scale)), min(c, cost.shape[2]) - 1
    else:
        i = c = k = 0
    if total < cost[lo, i, c, k]:
        cost[lo, i, c, k] = total
        found = origin[lo, i, c, k]
        found[0], found[1], found[2], found[3], found[4] = v, hi, j, d, n
    slack[lo, i, c, k] = max(slack[lo, i, c, k], left)


@compiled
def _joined(hi: int, where: int, types: Index, counts: Index, hops: Array, scale: float, cost: Array, slack: Array, price: Array,
            room: Array, at: Places) -> int:  # fmt: skip
    """What a stage that ends at hi can have behind it: labels of these types and counts, less the transfer to each type, that
    no other of more room undercuts. Into `price` and `room` [hi, where] both of each, into `at` its place; how many."""
    most, left, found = np.full(LABELS, np.inf), np.full(LABELS, -np.inf), 0
    origin = np.zeros((LABELS, 3), np.int32)
    for j in types:
        for c in counts:
            for k in range(LABELS if hops[j] < np.inf else 0):
                free = slack[hi, j, c, k] - hops[j]
                if cost[hi, j, c, k] < np.inf and free >= 0:
                    x = min(LABELS - 1, int(free * scale))
                    left[x] = max(left[x], free)
                    if cost[hi, j, c, k] < most[x]:
                        most[x], origin[x, 0], origin[x, 1], origin[x, 2] = cost[hi, j, c, k], j, c, k
    undercut = np.inf
    for x in range(LABELS - 1, -1, -1):
        if most[x] < undercut:
            undercut = price[hi, where, found] = most[x]
            room[hi, where, found] = left[x]
            at[hi, where, found] = origin[x]
            found += 1
    return found


@compiled
def _lists(
    lo: int, T: float, ahead: float, scale: float, blocking: bool, hop: Array, wire: Array, hop_inside: Array, wire_inside: Array,
    cost: Array, slack: Array, many: Index, prices: Array, rooms: Array, places: Places,
) -> None:  # fmt: skip
    """What stages that end at lo can have behind them: on another node; and on theirs, by their type and the devices there."""
    K, C = hop_inside.shape[0], cost.shape[2]
    every, counts, none = np.arange(K), np.arange(C), np.zeros(K)
    if wire[lo] < np.inf and (blocking or ahead + wire[lo] <= T):
        hops = none if blocking else none + hop[lo]
        many[lo, 0] = _joined(lo, 0, every, counts, hops, scale, cost, slack, prices, rooms, places)
    for i in range(K):
        least = wire_inside[:, i, lo].min()
        if least == np.inf or not (blocking or ahead + least <= T):
            continue
        hops = np.where(wire_inside[i, :, lo] < np.inf, none if blocking else hop_inside[i, :, lo], np.inf)
        for c in range(C):
            x = 1 + i * C + c
            many[lo, x] = _joined(lo, x, every, counts[c : c + 1], hops, scale, cost, slack, prices, rooms, places)


@compiled
def _extended(
    lo: int, hi: int, w: int, i: int, devices: int, node: int, free: float, taken: float, through: float, summed: float,
    price: float, least: Array, ahead: Array, scale: float, blocking: bool, hop: Array, wire: Array, near_hop: Array,
    near_wire: Array, cost: Array, slack: Array, origin: Places, many: Index, prices: Array, rooms: Array, places: Places,
) -> int:  # fmt: skip
    """A stage before all that it can have behind it; how many those are."""
    C, seen, after = cost.shape[2], 0, summed if lo == 0 else 0.0
    for near in range(1 + max(0, min(node - devices, C))):  # so many devices of its node are behind it; 0: on another
        x = 0 if near == 0 else 1 + i * C + near - 1
        if many[hi, x] == 0:
            continue
        held, step = wire[hi], hop[hi]
        if near > 0:
            held, step = near_wire[i, hi], near_hop[i, hi]
        if blocking:
            own, passed = free - taken - 2 * held - after, through + step + after
        else:  # all go over the link behind it, the first after its forward, and the last comes back
            own, passed = free - max(taken, held + through) - after, through + after
        if own < least[lo] or own + after - summed < ahead[lo]:
            continue
        seen += many[hi, x]
        for y in range(many[hi, x]):
            left = min(own, rooms[hi, x, y] + least[hi] - passed) - least[lo]
            if left < 0:
                break
            _put(lo, i, near + devices, left, prices[hi, x, y] + price, scale, w, hi, places[hi, x, y, 0], places[hi, x, y, 1],
                 places[hi, x, y, 2], cost, slack, origin)  # fmt: skip
    return seen


@compiled
def _cheapest(
    work: Array, again: Array, once: Array, once_again: Array, begin: Array, work_more: float, once_more: float, hop: Array,
    wire: Array, hop_inside: Array, wire_inside: Array, room: Array, b: int, samples: int, kind: Index, at: Index,
    devices: Index, others: Index, price: Array, sums: Array, node: Index, optimizer: Array, T: float, blocking: bool,
    gpipe: bool, used: Index, cost: Array, slack: Array, origin: Places, prices: Array, rooms: Array, places: Places,
) -> float:  # fmt: skip
    """From the last layer to the first, labels of pipelines of all layers from lo on: their price, and how long the layers before
    may take for the first forward and the last backward of a step."""
    W, L, K = len(kind), work.shape[1] - 1, hop_inside.shape[0]
    least, ahead = _before(once), _before(begin)
    back, busy = _nearest(hop, hop_inside), _nearest(wire, wire_inside)
    apart = np.full(L + 1, np.inf)
    near_hop, near_wire = _nearest(apart, hop_inside), _nearest(apart, wire_inside)
    many = np.zeros((L + 1, 1 + K * cost.shape[2]), np.int64)
    cost[:] = np.inf
    slack[:] = -np.inf
    behind = np.full(L + 1, L + 1)  # fewest stages of the layers from each on
    behind[L] = 0
    for lo in range(L - 1, -1, -1):
        scale = LABELS / max(T - least[lo], 1e-300)
        for hi in range(lo + 1, L + 1):
            window = samples if gpipe else min(samples, (behind[hi] + 1) * b)
            for w in range(W if behind[hi] <= L else 0):
                v, i, recompute = kind[w], at[w], 0.0 if room[0, kind[w], lo, hi] >= window else 1.0
                if recompute and room[1, v, lo, hi] < window:
                    continue
                behind[lo] = min(behind[lo], behind[hi] + 1)
                through = once[v, hi] - once[v, lo] + once_more + recompute * (once_again[v, hi] - once_again[v, lo])
                taken = work[v, hi] - work[v, lo] + work_more + recompute * (again[v, hi] - again[v, lo])
                if blocking:
                    taken, through = taken + 2 * busy[i, lo], through + back[i, lo]
                free, summed = T - optimizer[v, lo, hi], sums[w, lo, hi]
                left = free - taken - (summed if lo == 0 else 0.0) - least[lo]
                if left < 0 or free - taken - summed < ahead[lo]:
                    continue
                if hi == L:
                    _put(lo, i, devices[w], left, price[w], scale, w, L, 0, 0, 0, cost, slack, origin)
                else:
                    used[W] += _extended(
                        lo, hi, w, i, devices[w], node[i] - others[w], free, taken, through, summed, price[w], least, ahead,
                        scale, blocking, hop, wire, near_hop, near_wire, cost, slack, origin, many, prices, rooms, places,
                    )  # fmt: skip
        if lo > 0 and least[lo] < T:
            _lists(lo, T, ahead[lo], scale, blocking, hop, wire, hop_inside, wire_inside, cost, slack, many, prices, rooms,
                   places)  # fmt: skip
    lo = i = c = n = 0
    while lo < L and cost[0, 0, 0, 0] < np.inf:
        w, lo, i, c, n = origin[lo, i, c, n]
        used[w] += 1
    found: float = cost[0, 0, 0, 0]
    return found
