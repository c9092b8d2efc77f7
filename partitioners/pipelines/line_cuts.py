"""The best cuts of pipelines whose stages' kinds are given, and how long these take: compiled loops."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners.pipelines.stage_orders import fit
from hetpipe.partitioners.stage_kinds.plan_class import depth
from hetpipe.predict import pipeline
from hetpipe.predict.compiled import compiled, get_ready, inlined, once, twin

Array = NDArray[np.float64]
Index = NDArray[np.int64]
LEAN = (0.0, 1.0)  # how much of what is before and after a stage counts when cuts are chosen
HALVINGS = 30  # of the longest stage that is allowed
WAITING = 1.02  # times the least that its work takes: a pipeline that takes longer waits, and deeper warm-ups are tried


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


class Waits(NamedTuple):
    """What a pipeline waits for beside other replicas: the seconds of each stage's sums [V, lo, hi]; and for a stage that begins
    at each layer, the `first` layer whose sums its own wait for, and where it has to `stop` [L + 1]."""

    sums: Array
    first: Index
    stop: Index


class Fixed(NamedTuple):
    """What is the same for all pipelines of a problem: the bytes of layers (`memory_tables`) and the limit of each kind, the
    seconds of optimizers [V, lo, hi], and how many `more` each action takes; whether transfers block, stages may recompute, and
    sums begin early; and how many first layers need no backward (`frozen`)."""

    tables: Array
    limits: Array
    optimizer: Array
    more: float
    blocking: bool
    recompute: bool
    early: bool
    frozen: int


@once
def ready() -> None:
    """Compile the functions of this file, or read them from disk: outside of any time limit."""
    pipeline.ready()
    times, sent = np.ones((2, 1, 2)), np.ones((2, 1, 1, 2, 2))
    loaded, one, square = Loaded(times, times, sent, np.ones((1, 1, 2)), 1, 1, 0), np.ones(1, np.int64), np.ones((1, 2, 2))
    line, inside, ends = np.zeros((1, 1), np.int64), np.zeros((1, 0), np.bool_), np.arange(2)
    waits, fixed = Waits(square, ends, ends + 1), Fixed(np.zeros((1, 6, 2, 2)), np.ones(1), square, 0.0, False, True, True, 0)

    def first_use() -> None:
        best_line(line, inside, loaded, 1, one, waits, fixed, 1.0)
        ended(line[0], inside[0], ends, one, 1, loaded, waits, fixed)

    get_ready(first_use)


_depth, about = inlined(depth), twin(pipeline.about, pipeline.PARTS)


@inlined
def _again(forward: Array, lo: int, hi: int, frozen: int) -> float:
    """Seconds of running layers [lo, hi) again, of all layers before each [L + 1]."""
    return float(forward[max(hi, frozen)] - forward[max(lo, frozen)])


@compiled
def _within(
    T: float,
    line: Index,
    loaded: Loaded,
    waits: Waits,
    fixed: Fixed,
    lean: float,
    windows: Index,
    samples: int,
    ends: Index,
    recompute: Index,
) -> float:
    """When the last stage of the cuts that are found ends, -1 where there are none."""
    forward, backward, largest, sums = loaded.forward[0], loaded.backward[0], loaded.b, waits.sums
    n, L, rounds = len(line), forward.shape[1] - 1, samples / largest
    lo, most, ahead, back = 0, 0.0, 0.0, 0.0
    for s in range(n):
        v, last, own, f_own = line[s], lo, 0.0, 0.0
        for hi in range(lo + 1, min(waits.stop[lo], L - (n - 1 - s)) + 1):
            f = forward[v, hi] - forward[v, lo]
            g = backward[v, hi] - backward[v, lo]
            around = lean * (ahead + max(back, sums[v, waits.first[lo], hi]))
            if rounds * (f + g) + around > T:
                break
            flag = fit(v, lo, hi, windows[s], samples, largest, fixed.recompute, fixed.tables, fixed.limits)
            again = flag * _again(forward[v], lo, hi, fixed.frozen)
            end = rounds * (f + g + again) + around
            if flag >= 0 and end <= T:
                last, own, f_own, g_own, recompute[s] = hi, end, f, g + again, flag
        if last == lo:
            return -1.0
        most = max(most, own)
        ahead, back, lo = ahead + f_own, back + g_own, last
        ends[s + 1] = lo
    return most if lo == L else -1.0


@compiled
def _cut(
    T: float,
    line: Index,
    loaded: Loaded,
    waits: Waits,
    fixed: Fixed,
    lean: float,
    windows: Index,
    samples: int,
    best: Index,
    found: Index,
) -> bool:
    """Whether there are cuts with which each stage ends within T; into `best` the ends of the stages, of which the last to end is
    early, and into `found` which recompute. The time that is allowed is bisected; within it each stage in turn takes as many
    layers as it can."""
    n, forward, backward, sums = len(line), loaded.forward[0], loaded.backward[0], waits.sums
    ends, flags = np.zeros(n + 1, np.int64), np.zeros(n, np.int64)
    high = 0.0  # that is enough for any
    for v in line:
        high = max(high, (samples / loaded.b + n) * (2 * forward[v, -1] + backward[v, -1]) + sums[v, 0, -1])
    high = _within(min(T, high), line, loaded, waits, fixed, lean, windows, samples, best, found)
    low = 0.0
    for _ in range(HALVINGS if high > 0 else 0):
        if high - low <= 1e-4 * high:
            break
        middle = (low + high) / 2
        most = _within(middle, line, loaded, waits, fixed, lean, windows, samples, ends, flags)
        if most < 0:
            low = middle
        else:
            high = most
            best[:] = ends
            found[:] = flags
    return high >= 0


@inlined
def _late(
    first: int, v: int, lo: int, hi: int, again: int, forward: Array, backward: Array, sums: Array, early: bool, frozen: int
) -> float:
    """The seconds that the sums from layer `first` on take after the last backward, in which the sums of the layers that are done
    may begin if they are `early`."""
    late = 0.0 if early else float(sums[v, first, hi])
    for l in range(lo, hi if early else lo):  # noqa: E741
        below = backward[v, l] - backward[v, lo] + again * _again(forward[v], lo, l, frozen)
        late = max(late, sums[v, first, l + 1] - below)
    return late


@compiled
def durations(
    line: Index,
    inside: NDArray[np.bool_],
    ends: Index,
    recompute: Index,
    forwards: int,
    loaded: Loaded,
    more: float,
    blocking: bool,
    frozen: int,
) -> tuple[Array, Array, Array, Array, Index, Index, int]:
    """The arguments that `about` wants for a pipeline, of which so many first layers need no backward."""
    n, m, forward, backward = len(line), loaded.m, loaded.forward, loaded.backward
    occupied, latency = loaded.occupied, loaded.latency
    f, g, held, late = np.zeros((n, 2)), np.zeros((n, 2)), np.zeros((max(0, n - 1), 2)), np.zeros(max(0, n - 1))
    which, depths = np.zeros(m, np.int64), np.zeros(n, np.int64)
    if loaded.q > 0:
        which[m - 1] = 1
    first = 0  # stages that only run forward
    for s in range(n):
        v, lo, hi = line[s], ends[s], ends[s + 1]
        first += hi <= frozen
        depths[s] = m if hi <= frozen else _depth(forwards, n - s, m)
        for i in range(2):
            f[s, i] += forward[i, v, hi] - forward[i, v, lo] + more
            if hi > frozen:
                g[s, i] += backward[i, v, hi] - backward[i, v, lo] + recompute[s] * _again(forward[i, v], lo, hi, frozen) + more
        if s + 1 < n:
            w, near = line[s + 1], 1 if inside[s] else 0
            for i in range(2):
                if blocking:
                    sending = occupied[i, v, w, near, hi] + latency[v, w, near]
                    f[s, i], f[s + 1, i] = f[s, i] + sending, f[s + 1, i] + sending
                    if hi > frozen:
                        g[s, i], g[s + 1, i] = g[s, i] + sending, g[s + 1, i] + sending
                else:
                    held[s, i], late[s] = occupied[i, v, w, near, hi], latency[v, w, near]
    return f, g, held, late, which, depths, first


@compiled
def ended(
    line: Index,
    inside: NDArray[np.bool_],
    ends: Index,
    recompute: Index,
    forwards: int,
    loaded: Loaded,
    waits: Waits,
    fixed: Fixed,
) -> float:
    """Seconds until the gradient sums of a pipeline have ended, which begin in the last backward if `early`, and of its longest
    optimizer."""
    f, g, held, delays, which, depths, frozen = durations(
        line, inside, ends, recompute, forwards, loaded, fixed.more, fixed.blocking, fixed.frozen
    )
    forward, backward, first = loaded.forward[which[-1]], loaded.backward[which[-1]], waits.first
    for s in range(len(held)):
        if held[s, 0] == np.inf:  # there is no link between two such devices
            return np.inf
    done = about(f, g, held, delays, which, depths, frozen)
    end = longest = 0.0
    for s in range(len(line)):
        v, lo, hi = line[s], ends[s], ends[s + 1]
        after = _late(first[lo], v, lo, hi, recompute[s], forward, backward, waits.sums, fixed.early, fixed.frozen)
        end, longest = max(end, done[s] + after), max(longest, fixed.optimizer[v, lo, hi])
    return end + longest


@compiled
def _ideal(
    line: Index,
    inside: NDArray[np.bool_],
    ends: Index,
    recompute: Index,
    forward: Array,
    backward: Array,
    occupied: Array,
    m: int,
    more: float,
    frozen: int,
) -> tuple[float, float]:
    """About the least that m micro-batches take, and the longest stage or transfer."""
    before = ideal = period = 0.0
    for s in range(len(line)):
        v, lo, hi = line[s], ends[s], ends[s + 1]
        f, again = forward[v, hi] - forward[v, lo], recompute[s] * _again(forward[v], lo, hi, frozen)
        own = f + again + backward[v, hi] - backward[v, lo] + (2 if hi > frozen else 1) * more
        if s + 1 < len(line):
            period = max(period, occupied[v, line[s + 1], 1 if inside[s] else 0, hi])
        ideal, period, before = max(ideal, before + m * own), max(period, own), before + own
    return ideal, period


@compiled
def best_line(
    lines: Index,
    insides: NDArray[np.bool_],
    loaded: Loaded,
    samples: int,
    families: Index,
    waits: Waits,
    fixed: Fixed,
    below: float,
) -> tuple[int, int, float, float, Index, Index]:
    """The number of the best line, −1 if there is none; its family; when it ends; its longest stage; its ends; which
    recompute."""
    forward, backward, occupied = loaded.forward[0], loaded.backward[0], loaded.occupied[0]
    b, m, more, first = loaded.b, loaded.m, fixed.more, waits.first
    n, family = lines.shape[1], 0
    ends, flags, windows = np.zeros((2, n + 1), np.int64), np.zeros((2, n), np.int64), np.zeros(n, np.int64)
    least, best = below, -1
    for o in range(len(lines)):
        line = lines[o]
        for lean in LEAN:
            for forwards in families:
                for s in range(n):
                    windows[s] = min(_depth(forwards, n - s, m) * b, samples)
                if not _cut(least, line, loaded, waits, fixed, lean, windows, samples, ends[1], flags[1]):
                    break
                ideal, _ = _ideal(line, insides[o], ends[1], flags[1], forward, backward, occupied, m, more, fixed.frozen)
                if ideal >= least:
                    break
                found = ended(line, insides[o], ends[1], flags[1], forwards, loaded, waits, fixed)
                end, again = ends[1, 1], flags[1, 0]
                after = _late(first[0], line[0], 0, end, again, forward, backward, waits.sums, fixed.early, fixed.frozen)
                if found < least:
                    least, best, family = found, o, forwards
                    ends[0], flags[0] = ends[1], flags[1]
                if found <= (ideal + after) * WAITING:
                    break
    if best < 0:
        return -1, 0, np.inf, 0.0, ends[0], flags[0]
    _, period = _ideal(lines[best], insides[best], ends[0], flags[0], forward, backward, occupied, m, more, fixed.frozen)
    return best, family, least, period, ends[0], flags[0]
