"""The cheapest relaxed pipeline, compiled: for so many samples within T, at a price for each device. See `lower`."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.predict.compiled import compiled, get_ready, inlined

Array = NDArray[np.float64]
Index = NDArray[np.int64]
LABELS = 64  # of a first layer, a type and a number of devices on a node, by the time that they leave
NODE = 8  # devices on a node that are counted; on larger ones there may be any number
PLACES, SOME = 16, 4  # stages that are counted, and where nodes matter
CALL = 12_000  # joined labels that take as long as all else of one call


Origins = NDArray[np.int32]
Both = tuple[float, float]
LabelSpace = tuple[Array, Array, Origins, Array, Array, Origins]


class PipelineDemand(NamedTuple):
    """What pipelines need, whatever T and the prices are. There are V kinds of stage on K types, and L layers; arrays [V, L + 1]
    are seconds of all layers before each.

    `work` of all micro-batches, `backward` of it, `again` more under recompute, `once` the first forward and the last backward,
    `once_again` more under recompute, `ahead` the first forward; `work_more` and `once_more` of each stage, half of it
    forward. `behind` all that the first micro-batch, and the last, have to go through from each layer on [2, L + 1], `longest`
    the most that a micro-batch takes forward and backward, and `hiding` what of `work` is the last one's, if that can hide
    gradient sums (else 0) [2, V, L + 1]. `hop` both ways of a transfer, `wire` what all take one way, between nodes [L + 1] and
    inside of one [K, K, L + 1]."""

    work: Array
    backward: Array
    again: Array
    once: Array
    once_again: Array
    ahead: Array
    work_more: float
    once_more: float
    behind: Array
    longest: Array
    hiding: Array
    hop: Array
    wire: Array
    hop_inside: Array
    wire_inside: Array
    b: int
    samples: int


class Memory(NamedTuple):
    """The bytes that layers need on each kind, as `memory_tables` has them [V, L + 1, L + 1, 6]; the limit of each kind [V]; and
    whether stages may recompute."""

    tables: Array
    limits: Array
    recompute: bool


class Placings(NamedTuple):
    """The W ways in which a stage can be put on devices: the number of its kind and of its type, how many devices of a node that
    takes, and how many other replicas have one there at least; its price; and the seconds of its gradient sums [W, L + 1, L + 1].
    And how many devices a node has where there is one of a type [K]."""

    kind: Index
    at: Index
    devices: Index
    others: Index
    price: Array
    sums: Array
    node: Index


class Adapters(NamedTuple):
    """Prices of what leaves a node with devices of each type over its network adapters: `sent`, all samples' outputs at each
    boundary, and `rings`, the gradients of all layers before each, once for all owners that are on the node [K, L + 1]. And the
    most `owners` of a layer that it can have [K]."""

    sent: Array
    rings: Array
    owners: Index


class RelaxedPipeline(NamedTuple):
    """The least price, infinite where there is none; of each stage its placing, where it ends, and how many devices of its node
    are known to be behind it (0: the next is on another node); and the effort, in labels joined."""

    price: float
    placings: Index
    ends: Index
    near: Index
    effort: int


def label_space(L: int, K: int, most: int) -> LabelSpace:
    """Where labels are kept, with nodes of so many devices."""
    shape = L + 1, K, min(most, NODE), PLACES if most == 1 else SOME, LABELS
    joined = L + 1, 1 + K * shape[2], shape[3], LABELS
    return (np.zeros(shape), np.zeros(shape), np.zeros((*shape, 7), np.int32), np.zeros(joined), np.zeros(joined),
            np.zeros((*joined, 3), np.int32))  # fmt: skip


def cheapest(
    load: PipelineDemand, placings: Placings, memory: Memory, adapters: Adapters, optimizer: Array, T: float, below: float,
    blocking: bool, gpipe: bool, labels: LabelSpace,
) -> RelaxedPipeline:  # fmt: skip
    """The least price of a relaxed pipeline, if it is `below` this."""
    line = np.zeros((optimizer.shape[1] + 1, 3), dtype=np.int64)
    price, n, effort = _cheapest(*load, *placings, *memory, *adapters, optimizer, T, below, blocking, gpipe, line, *labels)
    placings_of, ends, near = line[:n].T
    return RelaxedPipeline(price, placings_of, ends, near, CALL + effort)


@cache
def ready() -> None:
    """Compile it, or read it from disk: outside of any time limit."""
    row, link, square, zero = np.ones((1, 2)), np.ones((1, 1, 2)), np.ones((1, 2, 2)), np.zeros(1, np.int64)
    two = np.ones((2, 1, 2))
    load = PipelineDemand(row, row, row, row, row, row, 0.0, 0.0, row, two, two, row[0], row[0], link, link, 1, 1)
    placings = Placings(zero, zero, zero + 1, zero, np.ones(1), square, zero + 1)
    memory, adapters = Memory(np.ones((1, 2, 2, 6)), np.ones(1), True), Adapters(row, row, zero + 1)
    get_ready(lambda: cheapest(load, placings, memory, adapters, square, 1.0, 1.0, False, False, label_space(1, 1, 1)))


@compiled
def _before(seconds: Array) -> Array:
    """The least of any kinds for all layers before each [L + 1]."""
    found = np.zeros(seconds.shape[1])
    for l in range(1, seconds.shape[1]):  # noqa: E741
        found[l] = found[l - 1] + (seconds[:, l] - seconds[:, l - 1]).min()
    return found


@compiled
def _spent(work: Array, kind: Index, price: Array, T: float) -> Array:
    """The least price of the work of all layers before each [L + 1], if no time of a device is left."""
    found = np.zeros(work.shape[1])
    for l in range(1, len(found)):  # noqa: E741
        least = np.inf
        for w in range(len(kind)):
            least = min(least, price[w] * (work[kind[w], l] - work[kind[w], l - 1]))
        found[l] = found[l - 1] + least / T
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
def _put(lo: int, i: int, c: int, p: int, left: float, total: float, scale: float, w: int, hi: int, j: int, d: int, n: int,
         k: int, near: int, cost: Array, slack: Array, origin: Origins, used: Origins) -> None:  # fmt: skip
    """Keep one more label of a type, so many devices on its node and so many stages, with so much more room than the layers
    before need: of those with about as much the least cost and the most room are kept, apart. Those of whole pipelines are all at
    (0, 0, 0, 0, 0). It comes from label (hi, j, d, n, k), of which so many devices are `near`."""
    if lo > 0:
        x, c, p = min(LABELS - 1, int(left * scale)), min(c, cost.shape[2]) - 1, min(p, cost.shape[3]) - 1
    else:
        i = c = p = x = 0
    if used[lo, i, c, p] == 0:
        used[lo, i, c, p] = 1
        cost[lo, i, c, p] = np.inf
        slack[lo, i, c, p] = -np.inf
    if total < cost[lo, i, c, p, x]:
        cost[lo, i, c, p, x] = total
        found = origin[lo, i, c, p, x]
        found[0], found[1], found[2], found[3], found[4], found[5], found[6] = w, hi, j, d, n, k, near
    slack[lo, i, c, p, x] = max(slack[lo, i, c, p, x], left)


@compiled
def _joined(hi: int, where: int, p: int, types: Index, counts: Index, hops: Array, sent: Array, scale: float, cost: Array,
            slack: Array, used: Origins, price: Array, room: Array, at: Origins, undercut: Array) -> int:  # fmt: skip
    """List what a stage that ends at hi can have behind it: labels of these types and counts, and of p + 1 stages, less the
    transfer to each type and with the price of what that sends back, that no other of more room and as few stages undercuts. Into
    `price` and `room` [hi, where, p] both of each, into `at` its place; how many."""
    some = 0
    for j in types:
        for c in counts:
            some += used[hi, j, c, p]
    if some == 0:
        return 0
    most, left, found = np.full(LABELS, np.inf), np.full(LABELS, -np.inf), 0
    origin = np.zeros((LABELS, 3), np.int32)
    for j in types:
        for c in counts:
            for k in range(LABELS if hops[j] < np.inf and used[hi, j, c, p] else 0):
                free = slack[hi, j, c, p, k] - hops[j]
                if cost[hi, j, c, p, k] < np.inf and free >= 0:
                    x = min(LABELS - 1, int(free * scale))
                    left[x] = max(left[x], free)
                    if cost[hi, j, c, p, k] + sent[j] < most[x]:
                        most[x], origin[x, 0], origin[x, 1], origin[x, 2] = cost[hi, j, c, p, k] + sent[j], j, c, k
    least = np.inf
    for x in range(LABELS - 1, -1, -1):
        least = min(least, undercut[x])
        if most[x] < least:
            least = price[hi, where, p, found] = most[x]
            room[hi, where, p, found] = left[x]
            at[hi, where, p, found] = origin[x]
            found += 1
        undercut[x] = least
    return found


@compiled
def _lists(
    lo: int, T: float, ahead: float, scale: float, blocking: bool, hop: Array, wire: Array, hop_inside: Array, wire_inside: Array,
    sent: Array, cost: Array, slack: Array, used: Origins, many: Index, prices: Array, rooms: Array, places: Origins,
) -> None:  # fmt: skip
    """List what stages that end at lo can have behind them: on another node; and on the same node, by their type and the devices
    there."""
    K, C, P = hop_inside.shape[0], cost.shape[2], cost.shape[3]
    every, counts, none = np.arange(K), np.arange(C), np.zeros(K)
    if wire[lo] < np.inf and (blocking or ahead + wire[lo] <= T):
        hops, undercut = none if blocking else none + hop[lo], np.full(LABELS, np.inf)
        for p in range(P):
            many[lo, 0, p] = _joined(lo, 0, p, every, counts, hops, sent[:, lo].copy(), scale, cost, slack, used, prices, rooms,
                                     places, undercut)  # fmt: skip
    for i in range(K):
        least = wire_inside[:, i, lo].min()
        if least == np.inf or not (blocking or ahead + least <= T):
            continue
        hops = np.where(wire_inside[i, :, lo] < np.inf, none if blocking else hop_inside[i, :, lo], np.inf)
        for c in range(C):
            x, undercut = 1 + i * C + c, np.full(LABELS, np.inf)
            for p in range(P):
                many[lo, x, p] = _joined(lo, x, p, every, counts[c : c + 1], hops, none, scale, cost, slack, used, prices, rooms,
                                         places, undercut)  # fmt: skip


@compiled
def _extended(
    lo: int, hi: int, w: int, i: int, p: int, devices: int, node: int, free: float, taken: float, through: float, summed: float,
    price: float, ring: float, owners: int, sent: float, below: float, least: Array, ahead: Array, scale: float, blocking: bool,
    hop: Array, wire: Array, near_hop: Array, near_wire: Array, cost: Array, slack: Array, origin: Origins, used: Origins,
    many: Index, prices: Array, rooms: Array, places: Origins,
) -> int:  # fmt: skip
    """A stage before all that it can have behind it, p + 1 stages; how many those are."""
    C, seen, after = cost.shape[2], 0, summed if lo == 0 else 0.0
    for near in range(1 + max(0, min(node - devices, C))):  # so many devices of its node are behind it; 0: on another
        x = 0 if near == 0 else 1 + i * C + near - 1
        if many[hi, x, p] == 0:
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
        seen += many[hi, x, p]
        own_price = price + _shared(ring, owners, node - devices - near) + (sent if near == 0 else 0.0)
        for y in range(many[hi, x, p]):
            left = min(own, rooms[hi, x, p, y] + least[hi] - passed) - least[lo]
            if left < 0:
                break
            if prices[hi, x, p, y] + own_price < below:
                at = places[hi, x, p, y]
                _put(lo, i, near + devices, p + 2, left, prices[hi, x, p, y] + own_price, scale, w, hi, at[0], at[1], p, at[2],
                     near, cost, slack, origin, used)  # fmt: skip
    return seen


@inlined
def _shared(ring: float, owners: int, beside: int) -> float:
    """The price of a stage's sums, where so many owners can be on a node, and so many of its devices are no stage's of this
    pipeline."""
    return ring / max(1, min(owners, beside + 1))


@compiled
def _taken(f: float, g: float, first: float, last: float, F: float, B: float, beyond: Both, m: float, depth: float) -> float:
    """The least time from the first forward of a stage to its last backward, where it takes f for all forwards, g for all
    backwards, `first` for the first forward and `last` for the last backward, and at most F and B for any. The first micro-batch
    and the last are `beyond` it for so long [2], and of m there are at most `depth` in flight."""
    found: float = max(f + g, first + beyond[0] + g, f + beyond[1] + last)
    if depth < m:  # before the first backward and after the last forward it can only do as many others as are in flight
        found = max(found, f + g + max(0.0, beyond[0] - (depth - 1) * F) + max(0.0, beyond[1] - (depth - 1) * B))
    return found


@compiled
def _rooms(table: Array, limit: float, samples: int, largest: int, allowed: bool) -> Both:
    """The most samples in flight of a stage, without and with recompute; infinite where all can be."""
    left = limit - table[0] - table[1] * samples
    plain = (left - table[3] * largest) / max(table[2], 1e-9)
    again = (left - table[5] * largest) / max(table[4], 1e-9) if allowed else -1.0
    return plain if plain < samples else np.inf, again if again < samples else np.inf


@compiled
def _spans(
    stage: tuple[float, float, float, float, float, float], most: Both, rooms: Both, beyond: Both, m: float, b: int
) -> Both:
    """The least time from the first forward of a stage to its last backward, without and with recompute; of its forwards and
    backwards, the first and the last, and what recompute adds to all and to one."""
    f, g, first, last, again, once_again = stage
    depth, depth_again = np.floor(rooms[0] / b), np.floor(rooms[1] / b)
    plain = _taken(f, g, first, last, most[0], most[1], beyond, m, depth) if depth > 0 else np.inf
    if depth_again < 1:
        return plain, np.inf
    return plain, _taken(f, g + again, first, last + once_again, most[0], most[1] + most[0], beyond, m, depth_again)


@compiled
def _cheapest(  # noqa: C901
    work: Array, backward: Array, again: Array, once: Array, once_again: Array, begin: Array, work_more: float, once_more: float,
    beyond: Array, longest: Array, hiding: Array, hop: Array, wire: Array, hop_inside: Array, wire_inside: Array, b: int,
    samples: int, kind: Index, at: Index, devices: Index, others: Index, price: Array, sums: Array, node: Index, tables: Array,
    limits: Array, allowed: bool, sent: Array, rings: Array, owners: Index, optimizer: Array, T: float, below: float,
    blocking: bool, gpipe: bool, line: Index, cost: Array, slack: Array, origin: Origins, prices: Array, rooms: Array,
    places: Origins,
) -> tuple[float, int, int]:  # fmt: skip
    """Find the cheapest pipeline. From the last layer to the first it makes labels of pipelines of all layers from lo on: their
    price, and how long the layers before may take for the first forward and the last backward of a step. The least price, how
    many stages that has, and the effort."""
    W, L, K, P, effort = len(kind), work.shape[1] - 1, hop_inside.shape[0], cost.shape[3], 0
    least, ahead, spent = _before(once), _before(begin), _spent(work, kind, price, T)
    on = 1.0 if blocking else 0.0  # transfers before it are a part of a stage
    back, busy = on * _nearest(hop, hop_inside), on * 2 * _nearest(wire, wire_inside)
    apart, m, largest = np.full(L + 1, np.inf), np.ceil(samples / b), min(b, samples)
    near_hop, near_wire = _nearest(apart, hop_inside), _nearest(apart, wire_inside)
    many, behind = np.zeros((L + 1, 1 + K * cost.shape[2], P), np.int64), np.zeros((L + 1, P), np.int64)
    used = np.zeros(cost.shape[:4], np.int32)
    for lo in range(L - 1, -1, -1):
        scale, after = LABELS / max(T - least[lo], 1e-300), np.zeros(W)
        for hi in range(lo + 1, L + 1):
            for w in range(W):
                v, i = kind[w], at[w]
                first, last = begin[v, hi] - begin[v, lo], once[v, hi] - once[v, lo] - begin[v, hi] + begin[v, lo]
                first, last = first + once_more / 2, last + once_more / 2
                f, g = work[v, hi] - work[v, lo], backward[v, hi] - backward[v, lo]
                f, g = f - g + work_more / 2, g + work_more / 2
                after[w] = max(after[w], sums[w, lo, hi] - (hiding[1, v, hi - 1] - hiding[1, v, lo]))
                free = T - optimizer[v, lo, hi]
                if free - f - g < max(least[lo], ahead[lo]):
                    continue
                stage = f, g, first, last, again[v, hi] - again[v, lo], once_again[v, hi] - once_again[v, lo]
                longer = longest[:, v, hi]
                most = longer[0] - longest[0, v, lo] + once_more / 2, longer[1] - longest[1, v, lo] + once_more / 2
                rooms_of = _rooms(tables[v, lo, hi], limits[v], samples, largest, allowed)
                plain, recomputed = _spans(stage, most, rooms_of, (beyond[0, hi], beyond[1, hi]), m, b)
                for p in range(-1 if hi == L else 0, 0 if hi == L else P):  # p + 1 stages behind it
                    if hi < L and behind[hi, p] == 0:
                        continue
                    window = samples if gpipe else min(samples, (p + 2) * b)
                    if max(rooms_of) < window:
                        break
                    taken, through = plain if rooms_of[0] >= window else np.inf, first + last
                    summed = after[w] - busy[i, lo] / 2  # a gradient that blocks is sent while they run
                    if rooms_of[0] < window:
                        through += stage[5]
                    if rooms_of[1] >= window:
                        if recomputed - (hiding[0, v, hi] - hiding[0, v, lo]) < taken:  # that hides them, too
                            summed -= hiding[0, v, hi] - hiding[0, v, lo]
                        taken = min(taken, recomputed)
                    summed = max(0.0, summed)
                    taken, through = taken + busy[i, lo], through + back[i, lo]
                    left = free - taken - (summed if lo == 0 else 0.0) - least[lo]
                    if left < 0 or free - taken - summed < ahead[lo]:
                        continue
                    ring = rings[i, hi] - rings[i, lo] if others[w] == 0 else 0.0
                    alone = price[w] + _shared(ring, owners[i], node[i] - devices[w])
                    if hi == L and alone + spent[lo] < below:
                        _put(lo, i, devices[w], 1, left, alone, scale, w, L, 0, 0, 0, 0, 0, cost, slack, origin, used)
                    elif hi < L:
                        effort += 1 + _extended(
                            lo, hi, w, i, p, devices[w], node[i] - others[w], free, taken, through, summed, price[w],
                            ring, owners[i], sent[i, hi], below - spent[lo], least, ahead, scale, blocking, hop, wire, near_hop,
                            near_wire, cost, slack, origin, used, many, prices, rooms, places,
                        )  # fmt: skip
        if lo > 0 and least[lo] < T:
            _lists(lo, T, ahead[lo], scale, blocking, hop, wire, hop_inside, wire_inside, sent, cost, slack, used, many, prices,
                   rooms, places)  # fmt: skip
            behind[lo] = many[lo].sum(axis=0)
    n = lo = i = c = p = k = 0
    found: float = cost[0, 0, 0, 0, 0] if used[0, 0, 0, 0] else np.inf
    while lo < L and found < np.inf:
        line[n, 0], line[n, 1], i, c, p, k, line[n, 2] = origin[lo, i, c, p, k]
        lo = line[n, 1]
        n += 1
    return found, n, effort
