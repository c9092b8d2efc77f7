"""The cheapest relaxed pipeline, compiled: for so many samples within T, at a price for each device. See `lower`."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners.bound.labels import LABELS, LabelSpace, join_labels, label_space, put_label
from hetpipe.predict.compiled import compiled, get_ready, inlined

Array = NDArray[np.float64]
Index = NDArray[np.int64]
CALL = 12_000  # joined labels that take as long as all else of one call
Both = tuple[float, float]


class PipelineDemand(NamedTuple):
    """What pipelines need, whatever T and the prices are. There are V kinds of stage on K types, and L layers; arrays [V, L + 1]
    are seconds of all layers before each.

    `work` of all micro-batches, `backward` of it, `again` more under recompute, `once` the first forward and the last backward,
    `once_again` more under recompute, `ahead` the first forward; `work_more` and `once_more` of each stage, half of it
    forward. `behind` all that the first micro-batch, and the last, have to go through from each layer on [2, L + 1], `longest`
    the most that a micro-batch takes forward and backward, and `hiding` what of `work` is the last one's, if that can hide
    gradient sums (else 0) [2, V, L + 1]. `hop` both ways of a transfer, `wire` what all take one way, between nodes [L + 1] and
    inside of one [K, K, L + 1]. Stages that end within the first `frozen` layers only run forward, and nothing comes back to
    them: no backward, and of `hop` the one way."""

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
    frozen: int


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


class Boundaries(NamedTuple):
    """Both ways of a transfer (`hop`), and what all take one way (`wire`), between nodes [L + 1], and inside of one from the
    nearest type to each [K, L + 1]."""

    hop: Array
    wire: Array
    near_hop: Array
    near_wire: Array


class Tried(NamedTuple):
    """A stage of layers [lo, hi) in way w, on type i: the seconds of T without its optimizer, of its work, of the first and last
    micro-batch, and of its sums; the price of these where no other owner is on its node; and how many `ways` something goes over
    the boundary behind it."""

    lo: int
    hi: int
    w: int
    i: int
    free: float
    taken: float
    through: float
    summed: float
    ring: float
    ways: float


def cheapest(
    load: PipelineDemand, placings: Placings, memory: Memory, adapters: Adapters, optimizer: Array, T: float, below: float,
    blocking: bool, gpipe: bool, labels: LabelSpace,
) -> RelaxedPipeline:  # fmt: skip
    """The least price of a relaxed pipeline, if it is `below` this."""
    line = np.zeros((optimizer.shape[1] + 1, 3), dtype=np.int64)
    price, n, effort = _cheapest(load, placings, memory, adapters, labels, optimizer, T, below, blocking, gpipe, line)
    placings_of, ends, near = line[:n].T
    return RelaxedPipeline(price, placings_of, ends, near, CALL + effort)


@cache
def ready() -> None:
    """Compile the functions of this file, or read them from disk: outside of any time limit."""
    row, link, square, zero = np.ones((1, 2)), np.ones((1, 1, 2)), np.ones((1, 2, 2)), np.zeros(1, np.int64)
    two = np.ones((2, 1, 2))
    load = PipelineDemand(row, row, row, row, row, row, 0.0, 0.0, row, two, two, row[0], row[0], link, link, 1, 1, 0)
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


@compiled
def _lists(
    labels: LabelSpace, lo: int, T: float, ahead: float, scale: float, blocking: bool, load: PipelineDemand, sent: Array
) -> None:
    """List what stages that end at lo can have behind them: on another node; and on the same node, by their type and the devices
    there."""
    K, C, P, many = load.hop_inside.shape[0], labels.cost.shape[2], labels.cost.shape[3], labels.many
    every, counts, none = np.arange(K), np.arange(C), np.zeros(K)
    returned = sent[:, lo].copy() if lo > load.frozen else none
    if load.wire[lo] < np.inf and (blocking or ahead + load.wire[lo] <= T):
        hops, undercut = none if blocking else none + load.hop[lo], np.full(LABELS, np.inf)
        for p in range(P):
            many[lo, 0, p] = join_labels(labels, lo, 0, p, every, counts, hops, returned, scale, undercut)
    for i in range(K):
        least = load.wire_inside[:, i, lo].min()
        if least == np.inf or not (blocking or ahead + least <= T):
            continue
        hops = np.where(load.wire_inside[i, :, lo] < np.inf, none if blocking else load.hop_inside[i, :, lo], np.inf)
        for c in range(C):
            x, undercut = 1 + i * C + c, np.full(LABELS, np.inf)
            for p in range(P):
                many[lo, x, p] = join_labels(labels, lo, x, p, every, counts[c : c + 1], hops, none, scale, undercut)


@compiled
def _extended(
    labels: LabelSpace, placings: Placings, boundaries: Boundaries, tried: Tried, p: int, owners: int, sent: float, below: float,
    least: Array, ahead: Array, scale: float, blocking: bool,
) -> int:  # fmt: skip
    """A stage before all that it can have behind it, p + 1 stages; how many those are."""
    lo, hi, w, i, free, taken, through, summed, ring, ways = tried
    devices, node, price = placings.devices[w], placings.node[i] - placings.others[w], placings.price[w]
    C, seen, after = labels.cost.shape[2], 0, summed if lo == 0 else 0.0
    for near in range(1 + max(0, min(node - devices, C))):  # so many devices of its node are behind it; 0: on another
        x = 0 if near == 0 else 1 + i * C + near - 1
        if labels.many[hi, x, p] == 0:
            continue
        held, step = boundaries.wire[hi], boundaries.hop[hi]
        if near > 0:
            held, step = boundaries.near_wire[i, hi], boundaries.near_hop[i, hi]
        if blocking:
            own, passed = free - taken - ways * held - after, through + step + after
        else:  # all go over the link behind it, the first after its forward, and the last comes back
            own, passed = free - max(taken, held + through) - after, through + after
        if own < least[lo] or own + after - summed < ahead[lo]:
            continue
        seen += labels.many[hi, x, p]
        own_price = price + _shared(ring, owners, node - devices - near) + (sent if near == 0 else 0.0)
        for y in range(labels.many[hi, x, p]):
            left = min(own, labels.rooms[hi, x, p, y] + least[hi] - passed) - least[lo]
            if left < 0:
                break
            total = labels.prices[hi, x, p, y] + own_price
            if total < below:
                at = labels.places[hi, x, p, y]
                put_label(labels, lo, i, near + devices, p + 2, left, total, scale, (w, hi, at[0], at[1], p, at[2], near))
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
    load: PipelineDemand, placings: Placings, memory: Memory, adapters: Adapters, labels: LabelSpace, optimizer: Array, T: float,
    below: float, blocking: bool, gpipe: bool, line: Index,
) -> tuple[float, int, int]:  # fmt: skip
    """Find the cheapest pipeline. From the last layer to the first it makes labels of pipelines of all layers from lo on: their
    price, and how long the layers before may take for the first forward and the last backward of a step. The least price, how
    many stages that has, and the effort."""
    work, backward, begin, once, beyond = load.work, load.backward, load.ahead, load.once, load.behind
    longest, hiding, once_more, b, samples = load.longest, load.hiding, load.once_more, load.b, load.samples
    kind, at, price, node = placings.kind, placings.at, placings.price, placings.node
    tables, rings = memory.tables, adapters.rings
    W, L, P, effort = len(kind), work.shape[1] - 1, labels.cost.shape[3], 0
    least, ahead, spent = _before(once), _before(begin), _spent(work, kind, price, T)
    on = 1.0 if blocking else 0.0  # transfers before it are a part of a stage
    ways = np.where(np.arange(L + 1) > load.frozen, 2.0, 1.0)  # that something goes over each boundary
    back, busy = on * _nearest(load.hop, load.hop_inside), on * ways * _nearest(load.wire, load.wire_inside)
    apart, m, largest = np.full(L + 1, np.inf), np.ceil(samples / b), min(b, samples)
    boundaries = Boundaries(load.hop, load.wire, _nearest(apart, load.hop_inside), _nearest(apart, load.wire_inside))
    behind = np.zeros((L + 1, P), np.int64)
    labels.many[:] = 0
    labels.used[:] = 0
    for lo in range(L - 1, -1, -1):
        scale, after = LABELS / max(T - least[lo], 1e-300), np.zeros(W)
        for hi in range(lo + 1, L + 1):
            for w in range(W):
                v, i = kind[w], at[w]
                first, last = begin[v, hi] - begin[v, lo], once[v, hi] - once[v, lo] - begin[v, hi] + begin[v, lo]
                comes_back = ways[hi] - 1
                first, last = first + once_more / 2, last + comes_back * once_more / 2
                f, g = work[v, hi] - work[v, lo], backward[v, hi] - backward[v, lo]
                f, g = f - g + load.work_more / 2, g + comes_back * load.work_more / 2
                after[w] = max(after[w], placings.sums[w, lo, hi] - (hiding[1, v, hi - 1] - hiding[1, v, lo]))
                free = T - optimizer[v, lo, hi]
                if free - f - g < max(least[lo], ahead[lo]):
                    continue
                stage = f, g, first, last, load.again[v, hi] - load.again[v, lo], load.once_again[v, hi] - load.once_again[v, lo]
                longer = longest[:, v, hi]
                most = longer[0] - longest[0, v, lo] + once_more / 2, longer[1] - longest[1, v, lo] + comes_back * once_more / 2
                rooms_of = _rooms(tables[v, lo, hi], memory.limits[v], samples, largest, memory.recompute)
                plain, recomputed = _spans(stage, most, rooms_of, (beyond[0, hi], beyond[1, hi]), m, b)
                for p in range(-1 if hi == L else 0, 0 if hi == L else P):  # p + 1 stages behind it
                    if hi < L and behind[hi, p] == 0:
                        continue
                    window = samples if gpipe else min(samples, (p + 2) * b)
                    if max(rooms_of) < window:
                        break
                    taken, through = plain if rooms_of[0] >= window else np.inf, first + last
                    summed = after[w] - (ways[lo] - 1) * busy[i, lo] / 2  # a gradient that blocks is sent while they run
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
                    ring = rings[i, hi] - rings[i, lo] if placings.others[w] == 0 else 0.0
                    alone = price[w] + _shared(ring, adapters.owners[i], node[i] - placings.devices[w])
                    if hi == L and alone + spent[lo] < below:
                        put_label(labels, lo, i, placings.devices[w], 1, left, alone, scale, (w, L, 0, 0, 0, 0, 0))
                    elif hi < L:
                        tried = Tried(lo, hi, w, i, free, taken, through, summed, ring, ways[hi])
                        effort += 1 + _extended(
                            labels, placings, boundaries, tried, p, adapters.owners[i], adapters.sent[i, hi], below - spent[lo],
                            least, ahead, scale, blocking,
                        )  # fmt: skip
        if lo > 0 and least[lo] < T:
            _lists(labels, lo, T, ahead[lo], scale, blocking, load, adapters.sent)
            behind[lo] = labels.many[lo].sum(axis=0)
    n = lo = i = c = p = k = 0
    found: float = labels.cost[0, 0, 0, 0, 0] if labels.used[0, 0, 0, 0] else np.inf
    while lo < L and found < np.inf:
        line[n, 0], line[n, 1], i, c, p, k, line[n, 2] = labels.origin[lo, i, c, p, k]
        lo = line[n, 1]
        n += 1
    return found, n, effort
