"""Pipelines that can be built of so many devices of each kind: their order, micro-batch, cuts and warm-up; cut and simulated by
compiled loops. Links are taken as they are if a pipeline's devices lie side by side; what a plan really takes `Steps` says."""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import cache
from itertools import permutations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.files.limits import MOST_BATCH
from hetpipe.partitioners import _ends
from hetpipe.partitioners._drafts import Work, in_runs
from hetpipe.partitioners._kept import kept
from hetpipe.partitioners._memory import fit
from hetpipe.partitioners._space import FORWARDS, allowed_families, depth
from hetpipe.partitioners._types import Types
from hetpipe.predict.compiled import compiled, get_ready, inlined

Array = NDArray[np.float64]
Index = NDArray[np.int64]
FEW_KINDS, SHORT = 3, 8  # of stages: all orders of so many are tried, of one more where there are so few stages
MOVED, FARTHEST, NEARLY = 8000, 1.3, 0.9999  # n·n·m up to which cuts are moved; from how much slower ones; by how much
LEAN = (0.0, 1.0)  # how much of what is before and after a stage counts when cuts are chosen
CLIMBS = 3  # of so many orders the best cuts are moved
HALVINGS = 30  # of the longest stage that is allowed
WAITING = 1.02  # times the least that its work takes: a pipeline that takes longer waits, and deeper warm-ups are tried


class Pipeline(NamedTuple):
    """One that can be built, cut for so many samples: the kind of each stage, where they end, which recompute; how many more
    forwards than the next a stage does before its first backward (0: all). With n samples it ends after about offset + ⌈n / b⌉
    · period."""

    stages: tuple[int, ...]
    b: int
    ends: tuple[int, ...]
    recompute: tuple[bool, ...]
    forwards: int
    common: tuple[int, ...]
    samples: int
    period: float
    offset: float

    def take(self, V: int) -> tuple[int, ...]:
        """Stages of each of the V kinds."""
        return tuple(np.bincount(self.stages, minlength=V).tolist())

    def done(self, seconds: float) -> int:
        """How many samples it does in this time, about."""
        left = max(0.0, seconds - self.offset)
        return int(left / self.period) * self.b if left < MOST_BATCH * self.period else MOST_BATCH

    def work(self, samples: int, L: int, degrees: tuple[int, ...], unused: int) -> Work:
        """What it does with so many samples, on a row with so many devices more than it uses."""
        sizes, n = in_runs(samples, self.b), len(self.stages)
        m = sum(count for _, count in sizes)
        depths = tuple(depth(self.forwards, n - s, m) for s in range(n)) if self.forwards != 1 else ()
        groups = degrees if max(degrees) > 1 else ()
        return Work(sizes, self.ends + (L,) * unused, self.recompute, groups, depths)


class Loaded(NamedTuple):
    """Micro-batches of b samples, `m` in all, the last of `q` instead if q > 0: seconds of all layers before each [2, V, L +
    1], of both sizes; of each boundary's transfer inside of nodes and between them [2, V, V, 2, L + 1]; and latencies [V, V,
    2]."""

    forward: Array
    backward: Array
    occupied: Array
    latency: Array
    b: int
    m: int
    q: int


class Reals:
    """Those of one problem."""

    def __init__(self, types: Types) -> None:
        self.types, self.L, self.problem = types, types.L, types.problem
        self.forwards = np.array([FORWARDS.get(family, 0) for family in allowed_families(self.problem)])
        runtime = self.problem.cluster.runtime_overhead
        self.more, self.blocking = runtime.action_seconds, not runtime.overlap_transfers
        speed = [types.times(v, types.sizes_of(kind)[0])[:, -1].sum() * kind.degree for v, kind in enumerate(types.kinds)]
        room = [types.limit[kind.at] * kind.degree for kind in types.kinds]
        orders = [sorted(range(types.V), key=by.__getitem__) for by in (room, speed)]
        self.orders = list(dict.fromkeys(tuple(way) for order in orders for way in (order, order[::-1])))
        self.limits = np.array([types.limit[kind.at] for kind in types.kinds])
        self.tables = np.stack([types.memory(v) for v in range(types.V)])
        ready()

    @kept
    def best(self, take: tuple[int, ...], samples: int, b: int, R: int, common: tuple[int, ...] = ()) -> Pipeline | None:
        """The one that ends first with so many samples in micro-batches of b, beside R − 1 other replicas that are all cut at
        `common`; None where there is none, or a kind was not measured at b."""
        measured = all(b in self.types.sizes_of(kind) for kind, count in zip(self.types.kinds, take, strict=True) if count)
        return self._of(*self._lines(take), samples, b, R, common) if measured and len(common) < sum(take) <= self.L else None

    @kept
    def quickest(self, take: tuple[int, ...], samples: int, R: int, common: tuple[int, ...]) -> Pipeline | None:
        """The best of all micro-batch sizes; those whose work takes least first, and others only as far as they could be."""
        best, below = None, math.inf
        for b in sorted(self.sizes(take, samples), key=lambda b: self._work(take, samples, b)):
            found = self._of(*self._lines(take), samples, b, R, common, below) if len(common) < sum(take) <= self.L else None
            if found is not None and found.offset + -(-samples // b) * found.period < below:
                best, below = found, found.offset + -(-samples // b) * found.period
        return best

    @kept
    def sizes(self, take: tuple[int, ...], samples: int) -> list[int]:
        """Micro-batch sizes that were measured on all of these: up to so many samples, and the next above."""
        kinds = [self.types.kinds[v] for v, count in enumerate(take) if count]
        every = sorted(set.intersection(*(set(self.types.sizes_of(kind)) for kind in kinds)))
        return every[: bisect_left(every, samples) + 1]

    def _work(self, take: tuple[int, ...], samples: int, b: int) -> float:
        """About what so many samples take if all stages work as long."""
        rate = sum(count / self.types.times(v, b)[:, -1].sum() for v, count in enumerate(take) if count)
        return float((-(-samples // b) + sum(take) - 1) / rate)

    @kept
    def of(self, line: tuple[int, ...], samples: int, b: int, R: int, common: tuple[int, ...]) -> Pipeline | None:
        """The same, with its stages on these kinds in this order."""
        return self._of(np.array([line]), self._inside(line)[None], samples, b, R, common) if len(common) < len(line) else None

    def _of(
        self, lines: Index, insides: NDArray[np.bool_], samples: int, b: int, R: int, common: tuple[int, ...],
        below: float = math.inf,
    ) -> Pipeline | None:  # fmt: skip
        loaded, (first, stop) = self.loaded(b, samples), self.blocks(common)
        which, forwards, seconds, period, ends, flags = _best(
            lines, insides, *loaded, samples, self.forwards, self.tables, self.limits, self.types.sums(R), self.types.optimizer,
            first, stop, self.more, self.blocking, self.problem.allow_recompute, self.problem.sums_early, below,
        )  # fmt: skip
        if which < 0:
            return None
        line, again = tuple(lines[which].tolist()), tuple(bool(x) for x in flags)
        return Pipeline(line, b, tuple(ends.tolist()), again, int(forwards), common, samples, period, seconds - loaded.m * period)

    def seconds(self, p: Pipeline, samples: int, R: int) -> float:
        """When its gradient sums and optimizers have ended, about as simulated: what its own last backward does not hide of a
        stage's sums, and those of all layers below it, down to a cut that all replicas have."""
        line, ends, flags = np.array(p.stages), np.array(p.ends), np.array(p.recompute, dtype=np.int64)
        found: float = _ended(
            line, self._inside(p.stages), ends, flags, p.forwards, *self.loaded(p.b, samples),
            self.types.sums(R), self.types.optimizer, self.blocks(p.common)[0], self.more, self.blocking, self.problem.sums_early,
        )  # fmt: skip
        return found

    @kept
    def _lines(self, take: tuple[int, ...]) -> tuple[Index, NDArray[np.bool_]]:
        """The kind of each stage [orders, n], in orders worth a look; and whether it and the next are on one node."""
        kinds = [v for v, count in enumerate(take) if count]
        few = len(kinds) <= FEW_KINDS or (len(kinds) == FEW_KINDS + 1 and sum(take) <= SHORT)
        orders = permutations(kinds) if few else self.orders
        lines = list(dict.fromkeys(tuple(v for v in order for _ in range(take[v])) for order in orders))
        return np.array(lines), np.array([self._inside(line) for line in lines])

    @kept
    def _inside(self, line: tuple[int, ...]) -> NDArray[np.bool_]:
        return np.array(self.types.insides(line), dtype=np.bool_)

    def loaded(self, b: int, samples: int) -> Loaded:
        """So many samples."""
        b = min(b, samples)
        return Loaded(*self._stacked(b, samples % b), b, -(-samples // b), samples % b)

    @kept
    def _stacked(self, b: int, q: int) -> tuple[Array, Array, Array, Array]:
        """Of both sizes."""
        *full, latency = self._sized(b)
        rest = self._sized(q)[:3] if q else full
        forward, backward, occupied = (np.stack([x, y]) for x, y in zip(full, rest, strict=True))
        return forward, backward, occupied, latency

    @kept
    def _sized(self, size: int) -> tuple[Array, Array, Array, Array]:
        """Of one micro-batch."""
        V = self.types.V
        times = np.array([self.types.times(v, size) for v in range(V)])
        sent = np.array([[[self.types.sent(i, j, size, inside) for inside in (False, True)] for j in range(V)] for i in range(V)])
        return times[:, 0].copy(), times[:, 1].copy(), np.ascontiguousarray(sent[..., :-1]), np.ascontiguousarray(sent[..., -1])

    @kept
    def blocks(self, common: tuple[int, ...]) -> tuple[Index, Index]:
        """Of a stage that begins at each layer, where the sums that its own wait for begin, and where it must end [L + 1]."""
        places = np.arange(self.L + 1)
        if not common:
            return places, np.full(self.L + 1, self.L)
        at = np.array([0, *common, self.L])
        after = np.searchsorted(at, places, side="right")
        return at[after - 1], at[np.minimum(after, len(at) - 1)]


@cache
def ready() -> None:
    """Compile it, or read it from disk: outside of any time limit."""
    _ends.ready()
    times, sent = np.ones((2, 1, 2)), np.ones((2, 1, 1, 2, 2))
    loaded, one, square = Loaded(times, times, sent, np.ones((1, 1, 2)), 1, 1, 0), np.ones(1, np.int64), np.ones((1, 2, 2))
    line, inside, ends = np.zeros((1, 1), np.int64), np.zeros((1, 0), np.bool_), np.arange(2)

    def first_use() -> None:
        tables = np.zeros((1, 6, 2, 2))
        _best(line, inside, *loaded, 1, one, tables, np.ones(1), square, square, ends, ends + 1, 0.0, False, True, True, 1.0)
        _ended(line[0], inside[0], ends, one, 1, *loaded, square, square, ends, 0.0, False, True)

    get_ready(first_use)


_depth, _fit = inlined(depth), inlined(fit)


@compiled
def _within(T: float, line: Index, forward: Array, backward: Array, sums: Array, first: Index, lean: float, tables: Array,
            limits: Array, windows: Index, samples: int, largest: int, again: bool, stop: Index, ends: Index,
            recompute: Index) -> float:  # fmt: skip
    """When the last stage of the cuts that are found ends, -1 where there are none."""
    n, L, rounds = len(line), forward.shape[1] - 1, samples / largest
    lo, most, ahead, back = 0, 0.0, 0.0, 0.0
    for s in range(n):
        v, last, own, f_own = line[s], lo, 0.0, 0.0
        for hi in range(lo + 1, min(stop[lo], L - (n - 1 - s)) + 1):
            f = forward[v, hi] - forward[v, lo]
            g = backward[v, hi] - backward[v, lo]
            around = lean * (ahead + max(back, sums[v, first[lo], hi]))
            if rounds * (f + g) + around > T:
                break
            fit = _fit(v, lo, hi, windows[s], samples, largest, again, tables, limits)
            end = rounds * (f + g + fit * f) + around
            if fit >= 0 and end <= T:
                last, own, f_own, g_own, recompute[s] = hi, end, f, g + fit * f, fit
        if last == lo:
            return -1.0
        most = max(most, own)
        ahead, back, lo = ahead + f_own, back + g_own, last
        ends[s + 1] = lo
    return most if lo == L else -1.0


@compiled
def _cut(T: float, line: Index, forward: Array, backward: Array, sums: Array, first: Index, lean: float, tables: Array,
         limits: Array, windows: Index, samples: int, largest: int, again: bool, stop: Index, best: Index,
         found: Index) -> bool:  # fmt: skip
    """Whether there are cuts with which each stage ends within T; into `best` the ends of the stages, of which the last to end is
    early, and into `found` which recompute. The time that is allowed is bisected; within it each stage in turn takes as many
    layers as it can."""
    n = len(line)
    ends, flags = np.zeros(n + 1, np.int64), np.zeros(n, np.int64)
    high = 0.0  # that is enough for any
    for v in line:
        high = max(high, (samples / largest + n) * (2 * forward[v, -1] + backward[v, -1]) + sums[v, 0, -1])
    high = _within(min(T, high), line, forward, backward, sums, first, lean, tables, limits, windows, samples, largest, again,
                   stop, best, found)  # fmt: skip
    low = 0.0
    for _ in range(HALVINGS if high > 0 else 0):
        if high - low <= 1e-4 * high:
            break
        middle = (low + high) / 2
        most = _within(middle, line, forward, backward, sums, first, lean, tables, limits, windows, samples, largest, again, stop,
                       ends, flags)  # fmt: skip
        if most < 0:
            low = middle
        else:
            high = most
            best[:] = ends
            found[:] = flags
    return high >= 0


@inlined
def _late(first: int, v: int, lo: int, hi: int, again: int, forward: Array, backward: Array, sums: Array,
          early: bool) -> float:  # fmt: skip
    """What the sums from layer `first` on take after the last backward, in which those of the layers that are done may begin
    `early`."""
    late = 0.0 if early else float(sums[v, first, hi])
    for l in range(lo, hi if early else lo):  # noqa: E741
        late = max(late, sums[v, first, l + 1] - (backward[v, l] - backward[v, lo]) - again * (forward[v, l] - forward[v, lo]))
    return late


@compiled
def durations(line: Index, inside: NDArray[np.bool_], ends: Index, recompute: Index, forwards: int, forward: Array,
              backward: Array, occupied: Array, latency: Array, m: int, q: int, more: float, blocking: bool,
              ) -> tuple[Array, Array, Array, Array, Index, Index]:  # fmt: skip
    """What `_ends.run` asks of a pipeline."""
    n = len(line)
    f, g, held, late = np.zeros((n, 2)), np.zeros((n, 2)), np.zeros((max(0, n - 1), 2)), np.zeros(max(0, n - 1))
    which, depths = np.zeros(m, np.int64), np.zeros(n, np.int64)
    if q > 0:
        which[m - 1] = 1
    for s in range(n):
        v, lo, hi = line[s], ends[s], ends[s + 1]
        depths[s] = _depth(forwards, n - s, m)
        for i in range(2):
            f[s, i] += forward[i, v, hi] - forward[i, v, lo] + more
            g[s, i] += backward[i, v, hi] - backward[i, v, lo] + recompute[s] * (forward[i, v, hi] - forward[i, v, lo]) + more
        if s + 1 < n:
            w, near = line[s + 1], 1 if inside[s] else 0
            for i in range(2):
                if blocking:
                    sending = occupied[i, v, w, near, hi] + latency[v, w, near]
                    f[s, i], f[s + 1, i] = f[s, i] + sending, f[s + 1, i] + sending
                    g[s, i], g[s + 1, i] = g[s, i] + sending, g[s + 1, i] + sending
                else:
                    held[s, i], late[s] = occupied[i, v, w, near, hi], latency[v, w, near]
    return f, g, held, late, which, depths


@compiled
def _ended(line: Index, inside: NDArray[np.bool_], ends: Index, recompute: Index, forwards: int, forward: Array, backward: Array,
           occupied: Array, latency: Array, b: int, m: int, q: int, sums: Array, optimizer: Array, first: Index, more: float,
           blocking: bool, early: bool) -> float:  # fmt: skip
    f, g, held, delays, which, depths = durations(
        line, inside, ends, recompute, forwards, forward, backward, occupied, latency, m, q, more, blocking
    )
    done = _ends.run(f, g, held, delays, which, depths)
    end = longest = 0.0
    for s in range(len(line)):
        v, lo, hi = line[s], ends[s], ends[s + 1]
        after = _late(first[lo], v, lo, hi, recompute[s], forward[which[-1]], backward[which[-1]], sums, early)
        end, longest = max(end, done[s] + after), max(longest, optimizer[v, lo, hi])
    return end + longest


@compiled
def _climbed(
    seconds: float, line: Index, inside: NDArray[np.bool_], ends: Index, recompute: Index, forwards: int, windows: Index,
    forward: Array, backward: Array, occupied: Array, latency: Array, b: int, m: int, q: int, samples: int, tables: Array,
    limits: Array, sums: Array, optimizer: Array, first: Index, stop: Index, more: float, blocking: bool, again: bool,
    early: bool,
) -> float:  # fmt: skip
    """When it ends with other cuts, of which each is moved by a layer as long as that is better."""
    moved = True
    while moved:
        moved = False
        for s in range(1, len(line)):
            for step in (1, -1):
                end, before, after = ends[s] + step, recompute[s - 1], recompute[s]
                if not ends[s - 1] < end < ends[s + 1] or end > stop[ends[s - 1]] or ends[s + 1] > stop[end]:
                    continue
                recompute[s - 1] = _fit(line[s - 1], ends[s - 1], end, windows[s - 1], samples, b, again, tables, limits)
                recompute[s] = _fit(line[s], end, ends[s + 1], windows[s], samples, b, again, tables, limits)
                ends[s] = end
                found = np.inf
                if min(recompute[s - 1], recompute[s]) >= 0:
                    found = _ended(line, inside, ends, recompute, forwards, forward, backward, occupied, latency, b, m, q, sums,
                                   optimizer, first, more, blocking, early)  # fmt: skip
                if found < seconds * NEARLY:
                    seconds, moved = found, True
                else:
                    ends[s], recompute[s - 1], recompute[s] = end - step, before, after
    return seconds


@compiled
def _ideal(line: Index, inside: NDArray[np.bool_], ends: Index, recompute: Index, forward: Array, backward: Array,
           occupied: Array, m: int, more: float) -> tuple[float, float]:  # fmt: skip
    """About the least that m micro-batches take, and the longest stage or transfer."""
    before = ideal = period = 0.0
    for s in range(len(line)):
        v, lo, hi = line[s], ends[s], ends[s + 1]
        f = forward[v, hi] - forward[v, lo]
        own = f * (1 + recompute[s]) + backward[v, hi] - backward[v, lo] + 2 * more
        if s + 1 < len(line):
            period = max(period, occupied[v, line[s + 1], 1 if inside[s] else 0, hi])
        ideal, period, before = max(ideal, before + m * own), max(period, own), before + own
    return ideal, period


@compiled
def _best(
    lines: Index, insides: NDArray[np.bool_], forward: Array, backward: Array, occupied: Array, latency: Array, b: int, m: int,
    q: int, samples: int, families: Index, tables: Array, limits: Array, sums: Array, optimizer: Array, first: Index, stop: Index,
    more: float, blocking: bool, again: bool, early: bool, below: float,
) -> tuple[int, int, float, float, Index, Index]:  # fmt: skip
    """The number of the best line, −1 if there is none; its family; when it ends; its longest stage; its ends; which
    recompute."""
    n, some = lines.shape[1], len(lines) * len(LEAN) * len(families)
    ends, flags, windows = np.zeros((some + 1, n + 1), np.int64), np.zeros((some + 1, n), np.int64), np.zeros(n, np.int64)
    seconds, tried, which = np.full(some + 1, np.inf), 0, np.zeros((some + 1, 2), np.int64)
    least, farthest = below, FARTHEST if n * n * m <= MOVED else 1.0
    for o in range(len(lines)):
        line = lines[o]
        for lean in LEAN:
            for forwards in families:
                for s in range(n):
                    windows[s] = min(_depth(forwards, n - s, m) * b, samples)
                if not _cut(least * farthest, line, forward[0], backward[0], sums, first, lean, tables, limits, windows, samples,
                            b, again, stop, ends[tried], flags[tried]):  # fmt: skip
                    break
                ideal, _ = _ideal(line, insides[o], ends[tried], flags[tried], forward[0], backward[0], occupied[0], m, more)
                if ideal >= least * farthest:
                    break
                found = _ended(line, insides[o], ends[tried], flags[tried], forwards, forward, backward, occupied, latency, b, m,
                               q, sums, optimizer, first, more, blocking, early)  # fmt: skip
                after = _late(first[0], line[0], 0, ends[tried, 1], flags[tried, 0], forward[0], backward[0], sums, early)
                which[tried, 0], which[tried, 1], seconds[tried] = o, forwards, found
                least, tried = min(least, found), tried + 1
                if found <= (ideal + after) * WAITING:
                    break
    if n * n * m <= MOVED:
        for x in np.argsort(seconds[:tried])[:CLIMBS]:
            o, forwards = which[x]
            for s in range(n):
                windows[s] = min(_depth(forwards, n - s, m) * b, samples)
            seconds[x] = _climbed(
                seconds[x], lines[o], insides[o], ends[x], flags[x], forwards, windows, forward, backward, occupied, latency, b,
                m, q, samples, tables, limits, sums, optimizer, first, stop, more, blocking, again, early,
            )  # fmt: skip
    x = seconds.argmin()
    if seconds[x] == np.inf:
        return -1, 0, np.inf, 0.0, ends[0], flags[0]
    o, forwards = which[x]
    _, period = _ideal(lines[o], insides[o], ends[x], flags[x], forward[0], backward[0], occupied[0], m, more)
    return o, forwards, seconds[x], period, ends[x], flags[x]
