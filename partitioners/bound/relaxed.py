"""The cheapest relaxed pipeline, compiled: for so many samples within T, at a price for each device. See `lower`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners.bound.labels import LABELS, PLACES, LabelSpace, label_space, list_labels, put_label
from hetpipe.predict.compiled import compiled, get_ready, once

Array = NDArray[np.float64]
Index = NDArray[np.int64]
CALL = 12_000  # joined labels that take as long as all else of one call
Both = tuple[float, float]


class PipelineDemand(NamedTuple):
    """What pipelines need, whatever T and the prices are. There are V kinds of stage, and L layers; arrays [V, L + 1]
    are seconds of all layers before each.

    `work` of all micro-batches, `backward` of it, `again` more under recompute, `once` the first forward and the last backward,
    `once_again` more under recompute, `ahead` the first forward; `work_more` and `once_more` of each stage, half of it
    forward. `behind` all that the first micro-batch, and the last, have to go through from each layer on [2, L + 1], `longest`
    the most that a micro-batch takes forward and backward, and `hiding` what of `work` is the last one's, if that can hide
    gradient sums (else 0) [2, V, L + 1]. `hop` both ways of a transfer over the best link that the kind can have, `wire` what
    all take one way [V, L + 1]. Of kinds whose nodes have one device `arrive` is what its adapter needs for all that comes over a
    boundary, `leave` for all that goes [V, L + 1] (0 for other kinds), and `counted` at least what one way of `hop` has of a
    transfer [L + 1]; and `sums` the seconds of gradient sums [V, lo, hi]. Stages that end within the first `frozen` layers
    only run forward, and nothing comes back to them: no backward, and of `hop` the one way."""

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
    arrive: Array
    leave: Array
    counted: Array
    sums: Array
    b: int
    samples: int
    frozen: int


class Memory(NamedTuple):
    """The bytes that layers need on each kind, as `memory_tables` has them [V, L + 1, L + 1, 6]; the limit of each kind [V]; and
    whether stages may recompute."""

    tables: Array
    limits: Array
    recompute: bool


class Tried(NamedTuple):
    """A stage of layers [lo, hi) on kind v: the seconds of T without its optimizer, of its work, of the first and last
    micro-batch, and of its sums; and how many `ways` something goes over the boundary behind it."""

    lo: int
    hi: int
    v: int
    free: float
    taken: float
    through: float
    summed: float
    ways: float


class RelaxedPipeline(NamedTuple):
    """The least price, infinite where there is none; the kind of each stage; and the effort, in labels joined."""

    price: float
    kinds: Index
    effort: int


def cheapest(
    load: PipelineDemand,
    price: Array,
    memory: Memory,
    optimizer: Array,
    T: float,
    below: float,
    blocking: bool,
    gpipe: bool,
    labels: LabelSpace,
) -> RelaxedPipeline:
    """The least price of a relaxed pipeline, at a price for a stage on each kind [V], if it is `below` this."""
    line = np.zeros(optimizer.shape[1] + 1, dtype=np.int64)
    found, n, effort = _cheapest(load, price, memory, labels, optimizer, T, below, blocking, gpipe, line)
    return RelaxedPipeline(found, line[:n], CALL + effort)


@once
def ready() -> None:
    """Compile the functions of this file, or read them from disk: outside of any time limit."""
    row, square, two = np.ones((1, 2)), np.ones((1, 2, 2)), np.ones((2, 1, 2))
    load = PipelineDemand(row, row, row, row, row, row, 0.0, 0.0, row, two, two, row, row, row, row, row[0], square, 1, 1, 0)
    memory = Memory(np.ones((1, 2, 2, 6)), np.ones(1), True)
    get_ready(lambda: cheapest(load, np.ones(1), memory, square, 1.0, 1.0, False, False, label_space(1)))


@compiled
def _before(seconds: Array) -> Array:
    """The least of any kinds for all layers before each [L + 1]."""
    found = np.zeros(seconds.shape[1])
    for l in range(1, seconds.shape[1]):  # noqa: E741
        found[l] = found[l - 1] + (seconds[:, l] - seconds[:, l - 1]).min()
    return found


@compiled
def _spent(work: Array, price: Array, T: float) -> Array:
    """The least price of the work of all layers before each [L + 1], if no time of a device is left."""
    found = np.zeros(work.shape[1])
    for l in range(1, len(found)):  # noqa: E741
        least = np.inf
        for v in range(len(price)):
            least = min(least, price[v] * (work[v, l] - work[v, l - 1]))
        found[l] = found[l - 1] + least / T
    return found


@compiled
def _fastest(seconds: Array) -> Array:
    """The least of any kind at each boundary [L + 1]."""
    found = np.full(seconds.shape[1], np.inf)
    for v in range(len(seconds)):
        for l in range(seconds.shape[1]):  # noqa: E741
            found[l] = min(found[l], seconds[v, l])
    return found


@compiled
def _adapter(load: PipelineDemand, v: int, lo: int, hi: int, comes: Both, first: float, last: float) -> float:
    """The least time from the first forward of a stage to its last backward that the adapter of its node allows, if the node has
    no other device (else 0). Before its last backward all inputs and gradients have come in; after its first forward all outputs
    and gradients go out. `comes` says whether gradients cross the boundaries before and behind it. Only the first input and the
    last gradient have time outside of it, which is `counted` with the hop."""
    into = load.arrive[v, lo] + comes[1] * load.arrive[v, hi]
    out = load.leave[v, hi] + comes[0] * load.leave[v, lo]
    if into + out == 0:
        return 0.0
    found: float = max(into - load.counted[lo] + last, out - load.counted[lo] + first)
    return found


@compiled
def _extended(
    labels: LabelSpace,
    tried: Tried,
    p: int,
    load: PipelineDemand,
    price: float,
    below: float,
    least: Array,
    ahead: Array,
    nearest: float,
    scale: float,
    blocking: bool,
) -> None:
    """A stage before all that it can have behind it, p + 1 stages; `nearest` is the hop that their rooms are without."""
    lo, hi, v, free, taken, through, summed, ways = tried
    after, held = summed if lo == 0 else 0.0, load.wire[v, hi]
    if blocking:
        own, passed = free - taken - ways * held - after, through + load.hop[v, hi] + after
    else:  # all go over the link behind it, the first after its forward, and the last comes back
        own, passed = free - max(taken, held + through) - after, through + after + load.hop[v, hi] - nearest
    if own < least[lo] or own + after - summed < ahead[lo]:
        return
    for y in range(labels.many[hi, p]):
        left = min(own, labels.rooms[hi, p, y] + least[hi] - passed) - least[lo]
        if left < 0:
            break
        total = labels.prices[hi, p, y] + price
        if total < below:
            put_label(labels, lo, p + 1, left, total, scale, v, hi, p, labels.places[hi, p, y])


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
    load: PipelineDemand,
    price: Array,
    memory: Memory,
    labels: LabelSpace,
    optimizer: Array,
    T: float,
    below: float,
    blocking: bool,
    gpipe: bool,
    line: Index,
) -> tuple[float, int, int]:
    """Find the cheapest pipeline. From the last layer to the first it makes labels of pipelines of all layers from lo on: their
    price, and how long the layers before may take for the first forward and the last backward of a step. The least price, how
    many stages that has, and the effort."""
    work, backward, begin, once, beyond = load.work, load.backward, load.ahead, load.once, load.behind
    longest, hiding, once_more, b, samples = load.longest, load.hiding, load.once_more, load.b, load.samples
    V, L, effort = len(price), work.shape[1] - 1, 0
    least, ahead, spent = _before(once), _before(begin), _spent(work, price, T)
    on = 1.0 if blocking else 0.0  # transfers before it are a part of a stage
    ways, back, busy = np.ones(L + 1), np.zeros((V, L + 1)), np.zeros((V, L + 1))
    for l in range(1, L + 1):  # noqa: E741
        ways[l] = 2.0 if l > load.frozen else 1.0  # that something goes over each boundary
        for v in range(V):
            back[v, l], busy[v, l] = on * load.hop[v, l], on * ways[l] * load.wire[v, l]
    hop, wire = _fastest(load.hop), _fastest(load.wire)
    m, largest = np.ceil(samples / b), min(b, samples)
    labels.many[:] = 0
    labels.cost[:] = np.inf
    labels.slack[:] = -np.inf
    for lo in range(L - 1, -1, -1):
        scale, after = LABELS / max(T - least[lo], 1e-300), np.zeros(V)
        for hi in range(lo + 1, L + 1):
            for v in range(V):
                first, last = begin[v, hi] - begin[v, lo], once[v, hi] - once[v, lo] - begin[v, hi] + begin[v, lo]
                comes_back = ways[hi] - 1
                first, last = first + once_more / 2, last + comes_back * once_more / 2
                f, g = work[v, hi] - work[v, lo], backward[v, hi] - backward[v, lo]
                f, g = f - g + load.work_more / 2, g + comes_back * load.work_more / 2
                after[v] = max(after[v], load.sums[v, lo, hi] - (hiding[1, v, hi - 1] - hiding[1, v, lo]))
                free = T - optimizer[v, lo, hi]
                if free - f - g < max(least[lo], ahead[lo]):
                    continue
                stage = f, g, first, last, load.again[v, hi] - load.again[v, lo], load.once_again[v, hi] - load.once_again[v, lo]
                longer = longest[:, v, hi]
                most = longer[0] - longest[0, v, lo] + once_more / 2, longer[1] - longest[1, v, lo] + comes_back * once_more / 2
                rooms_of = _rooms(memory.tables[v, lo, hi], memory.limits[v], samples, largest, memory.recompute)
                plain, recomputed = _spans(stage, most, rooms_of, (beyond[0, hi], beyond[1, hi]), m, b)
                for p in range(-1 if hi == L else 0, 0 if hi == L else PLACES):  # p + 1 stages behind it
                    if hi < L and labels.many[hi, p] == 0:
                        continue
                    window = samples if gpipe else min(samples, (p + 2) * b)
                    if max(rooms_of) < window:
                        break
                    taken, through = plain if rooms_of[0] >= window else np.inf, first + last
                    summed = after[v] - (ways[lo] - 1) * busy[v, lo] / 2  # a gradient that blocks is sent while they run
                    if rooms_of[0] < window:
                        through += stage[5]
                    if rooms_of[1] >= window:
                        if recomputed - (hiding[0, v, hi] - hiding[0, v, lo]) < taken:  # that hides them, too
                            summed -= hiding[0, v, hi] - hiding[0, v, lo]
                        taken = min(taken, recomputed)
                    summed = max(0.0, summed)
                    taken = max(taken, _adapter(load, v, lo, hi, (ways[lo] - 1, comes_back), first, last))
                    taken, through = taken + busy[v, lo], through + back[v, lo]
                    left = free - taken - (summed if lo == 0 else 0.0) - least[lo]
                    if left < 0 or free - taken - summed < ahead[lo]:
                        continue
                    if hi == L and price[v] + spent[lo] < below:
                        put_label(labels, lo, 0, left, price[v], scale, v, L, 0, 0)
                    elif hi < L:
                        tried = Tried(lo, hi, v, free, taken, through, summed, ways[hi])
                        _extended(labels, tried, p, load, price[v], below - spent[lo], least, ahead, hop[hi], scale, blocking)
                        effort += 1 + labels.many[hi, p]
        if lo > 0 and least[lo] < T and wire[lo] < np.inf and (blocking or ahead[lo] + wire[lo] <= T):
            list_labels(labels, lo, 0.0 if blocking else hop[lo], scale)
    n = lo = p = k = 0
    found: float = labels.cost[0, 0, 0]
    while lo < L and found < np.inf:
        line[n], lo, p, k = labels.origin[lo, p, k]
        n += 1
    return found, n, effort
