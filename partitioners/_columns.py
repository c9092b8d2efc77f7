"""The pipelines that are worth their price: the columns of the counted planner.

Given a step T, a price π_k for every device of class k and ρ for a replica, `search` lists every pipeline that could
do more samples within T than its devices cost, n > π·c + ρ, told apart by its devices c. It puts stages on from the
last to the first, all partial pipelines ("rows") of all loads at once, and keeps with each a bound on its time.

**Loads.** A load is a micro-batch size b and a range of samples [n₁, n₂]. A pipeline of n ≥ n₁ samples does m = ⌊n₁ / b⌋
full micro-batches and, if q = n₁ mod b > 0, at least q samples more.

**The bound.** Let u be the time of one micro-batch from the end of its forward on the stage before, down to the last
stage and back, and g the time from a stage's first forward to its last backward. With x = m·(F + B) of stage s,

    g_s ≥ x + wait(u),    g_s ≥ F + B + hop + g_{s+1},    g_s ≥ F + B + (m − 1)·wire + hop + u

- The stage does its own work, and waits: with depth w < m, at most w − 1 forwards can be done while the first
  micro-batch is away (idle ≥ u − (w − 1)F), and at most w − 1 backwards while the last one is (idle ≥ u − (w − 1)B);
  the first gap ends before the second begins. With w = m they are one gap, and the larger counts.
- All that stage s + 1 does happens between its first activation and its last gradient.
- The link carries all m activations one after the other, and the last one goes down and back.

This holds for the first m micro-batches (a longest path does not grow when nodes are taken out), and, with q, for the
whole load: the last micro-batch is then smaller, so that only parts of F + B, of B and of u count for it (`Stages.rate`,
`Stages.last`); both are kept, as `whole` and `first`. Then

    least time once through the layers before s + g_s + optimizer_s + least sums of a first stage ≤ T,
    least forwards before s + g_s + sums_s + optimizer_s ≤ T,      g_0 + sums_0 + optimizer_0 ≤ T

for every pipeline of a plan that ends within T: sums start when the backwards of all owners have ended, and
optimizers when all sums have. Of rows with the same load, devices and first layer only the least g and u are kept,
apart. Depths: the deepest that fits in memory and that any allowed schedule has at this place (more depth waits
less), without recompute, or with it where that allows more. All of this only relaxes, so nothing that fits is lost.

**Prices.** A row is given up when its price, and the least that the layers left must cost, reach n₂ − ρ. The latter
is a shortest path over stages that could fit within T by their work alone; few rows survive it when the prices are
those of a nearly optimal linear program, which is why pipelines of any length and any mix can be told apart.

Transfers that do not overlap compute (`runtime_overhead`) lengthen the actions at both ends instead, and the step is
no shorter: the bound holds."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners._kinds import Array
from hetpipe.partitioners._loads import Index, Loads, all_loads
from hetpipe.partitioners._stages import Stages

AT_ONCE = 2**15  # rows whose bounds are computed together: what a processor's cache holds
SLACK = 1 + 1e-9  # bounds are sums in another order than the simulator's
Counts = tuple[int, ...]


class Column(NamedTuple):
    """A pipeline that could do `samples` with devices `used` within T, and its load."""

    used: Counts
    samples: int
    size: int


class Effort(NamedTuple):
    """Limits of a search: it ends once there are so many columns, or `Columns.seen` so many candidates; and keeps so
    many rows, those with the most room to their price."""

    columns: float = math.inf
    candidates: float = math.inf
    rows: float = math.inf


class Rows(NamedTuple):
    """Partial pipelines [N]: load, first layer, devices used [N, K], price, u, g of the first micro-batches and of
    the whole load, and the candidate of the place before that each extends."""

    load: Index
    lo: Index
    used: Index
    price: Array
    u: Array
    first: Array
    whole: Array
    made: Index


class Step(NamedTuple):
    """What a search at one T is about, per load: sizes b, m, q, samples; sums [V, lo, hi]; the furthest first layer
    that a stage which ends at hi can reach back to [G, V, L + 1]."""

    T: float
    sums: Array
    loads: Loads
    b: Index
    m: Index
    q: Index
    reach: Index

    def pick(self, rows: NDArray[np.bool_]) -> Step:
        """Some of the loads."""
        return Step(self.T, self.sums, *(x.pick(rows) if isinstance(x, Loads) else x[rows] for x in self[2:]))  # type: ignore[arg-type]


class Columns:
    """The enumeration over one problem."""

    def __init__(self, stages: Stages) -> None:
        self.stages, self.kinds, self.L = stages, stages.kinds, stages.L
        self.counts = np.array(self.kinds.counts)
        self.at, self.degree = self.kinds.at, self.kinds.degree
        base = np.minimum(self.counts, self.L * int(self.degree.max())) + 1
        self.radix = np.cumprod([1, *base[:-1]], dtype=np.int64)  # may wrap: then unlike rows share a bound
        self.codes = int(min(np.prod(base.astype(float)), 2**40))
        self.coarse = all_loads(stages, self.kinds.problem.global_batch)
        self.held = self._held(self.coarse)
        self.cuts: tuple[int, ...] | None = None
        self.common: tuple[int, ...] | None = ()
        self.seen = 0  # candidates so far

    def cut_at(self, cuts: tuple[int, ...], common: tuple[int, ...] | None) -> Columns:
        """The same, of pipelines that are cut at these layers only (with 0 and L), and at all of `common` of them, whose
        sums are then known. None: at any of them, but with sums as if all were cut at all, which is no more than hoped."""
        found = copy.copy(self)
        found.cuts, found.common, found.seen = cuts, common, 0
        return found

    @property
    def layers(self) -> Sequence[int]:
        """Where stages may begin or end."""
        return range(self.L + 1) if self.cuts is None else self.cuts

    def sums(self, R: int) -> Array:
        """Least seconds [V, lo, hi] of a stage's gradient sums."""
        if self.cuts is None:
            return self.kinds.sum_floor(R)
        common = tuple(self.cuts[1:-1]) if self.common is None else self.common
        return np.repeat(self.kinds.sums(R, self.cuts, common)[None], self.kinds.V, axis=0)

    # -- stages by their work alone -------------------------------------------------------------------------

    def step(self, T: float, R: int, loads: Loads) -> Step:
        """What can be done within T beside R − 1 other replicas, by work and memory alone."""
        b = np.array(self.stages.sizes)[loads.size]
        m, q = loads.low // b, loads.low % b
        sums, T = self.sums(R), T * SLACK
        reach = self.held[loads.held].copy()
        for i in np.unique(loads.size):
            rows = loads.size == i
            within = self._within(T, sums, m[rows], q[rows], int(i))
            reach[rows] = np.where(self.stages.usable[i][:, None], np.maximum(reach[rows], within), self.L + 1)
        if self.cuts is not None:
            last = np.array([0, *(self.common or ())])
            reach = np.maximum(reach, last[np.maximum(np.searchsorted(last, np.arange(self.L + 1)), 1) - 1])
            after = np.searchsorted(self.cuts, np.arange(self.L + 2))
            reach = np.array([*self.cuts, self.L + 1])[after[reach]]
        return Step(T, sums, loads, b, m, q, reach)

    def _within(self, T: float, sums: Array, m: Index, q: Index, i: int) -> Index:
        """[loads, V, hi]: the first lo from which a stage's own work can end at hi within T."""
        stages, L = self.stages, self.L
        n, rest = m[:, None, None], q[:, None, None]
        work, rate = stages.prefix(stages.work[i]), stages.prefix(stages.rate[i])  # [V, L + 1]
        done = n * work + rest * rate + stages.prefix(stages.optimizer)
        once = np.where(rest > 0, stages.forward_part[i], 1.0) * (n > 0) * stages.least[i]
        layers = np.array([*self.layers, L + 1])
        start = (done - once)[:, :, layers[:-1]]
        start[:, :, 1:] -= n * 2 * stages.overhead  # of a stage, not of a layer
        found = np.zeros((len(m), self.kinds.V, L + 1), dtype=np.int64)
        least = sums[:, 0, 1].min()
        for hi in self.layers[1:]:
            last = done[:, :, hi] - (T - least) - 1e-12 * T
            first = (start < last[:, :, None]).sum(axis=2)
            whole = last + sums[:, 0, hi] - least > start[:, :, 0]
            found[:, :, hi] = layers[np.where((first == 0) & whole, 1, first)]
        found[found >= np.arange(L + 1)] = L + 1
        return found

    def _held(self, loads: Loads) -> Index:
        """[G, V, hi]: the first lo from which a stage fits in memory with one micro-batch in flight."""
        stages = self.stages
        n = loads.low[:, None, None]
        held = np.minimum(n, np.array(stages.sizes)[loads.size][:, None, None])
        found = np.full((len(n), self.kinds.V, self.L + 1), self.L + 1)
        for v in range(self.kinds.V):
            fits = np.zeros((len(n), self.L + 1, self.L + 1), dtype=bool)
            for r in (0, 1):
                fits |= stages.room[r, v] - n * stages.boundary[r, v] - held * stages.transient[r, v] >= held
            found[:, v] = np.where(fits.any(axis=1), fits.argmax(axis=1), self.L + 1)
        return found

    def to_go(self, step: Step, price: Array) -> Array:
        """The least price of layers [0, hi) or more, [G, L + 2]; infinite at L + 1. (Or more: a longer stage may fit
        where a shorter one does not, whose output is larger.)"""
        least = np.full((len(step.b), self.L + 2), np.inf)
        least[:, 0] = 0.0
        rows = np.arange(len(step.b))[:, None]
        for hi in self.layers[1:]:
            found = (least[rows, step.reach[:, :, hi]] + price).min(axis=1)
            least[:, hi] = found
            np.minimum(least[:, 1:hi], found[:, None], out=least[:, 1:hi])
        return least

    def alive(self, step: Step, prices: Array, fixed: float) -> NDArray[np.bool_]:
        """Loads that may be worth more than their price, by work alone."""
        found: NDArray[np.bool_] = self.to_go(step, prices[self.at] * self.degree)[:, self.L] + fixed < step.loads.high
        return found

    # -- the enumeration ------------------------------------------------------------------------------------

    def search(
        self, step: Step, prices: Array, fixed: float, effort: Effort
    ) -> tuple[list[Column], Loads, bool]:
        """Compositions of pipelines that could be worth more than their price, with their most samples; the loads of
        all such pipelines; and whether these are all, or the limits of `effort` left some out."""
        price = prices[self.at] * self.degree
        to_go = self.to_go(step, price)
        alive = to_go[:, self.L] + fixed < step.loads.high
        step, to_go = step.pick(alive), to_go[alive]
        rows = self.ends(len(step.b))
        most: dict[Counts, Column] = {}
        hit, everything = np.zeros(len(step.b), dtype=bool), True
        for place in range(1, self.L + 1):
            if not len(rows.lo) or len(most) >= effort.columns or self.seen > effort.candidates:
                break
            rows = self._grow(step, rows, place, price, to_go, fixed)
            done = rows.lo == 0
            self._note(most, step, rows.used[done], rows.load[done])
            hit[rows.load[done]] = True
            rows = self._merged(Rows._make(x[~done] for x in rows))
            if len(rows.lo) > effort.rows:
                left = (rows.price + to_go[rows.load, rows.lo] + fixed) / step.loads.high[rows.load]
                best = np.argpartition(left, int(effort.rows))[: int(effort.rows)]
                rows, everything = Rows._make(x[best] for x in rows), False
        return list(most.values()), step.loads.pick(hit), everything and not len(rows.lo)

    @staticmethod
    def _note(most: dict[Counts, Column], step: Step, used: Index, load: Index) -> None:
        """Keep the most samples of each composition."""
        samples, sizes = step.loads.high[load].tolist(), step.loads.size[load].tolist()
        for c, n, i in zip(map(tuple, used.tolist()), samples, sizes, strict=True):
            if c not in most or n > most[c].samples:
                most[c] = Column(c, n, i)

    def ends(self, loads: int) -> Rows:
        """One empty row per load."""
        zero, none = np.zeros(loads), np.zeros((loads, self.kinds.K), dtype=np.int64)
        at = np.arange(loads)
        return Rows(at, np.full(loads, self.L), none, zero, zero, zero, zero, at)

    def _grow(self, step: Step, rows: Rows, place: int, price: Array, to_go: Array, fixed: float) -> Rows:
        """Rows with one stage more, those that T and the prices leave."""
        parent, v, lo = self._candidates(step, rows, price, to_go, fixed)
        load = rows.load[parent]
        paid = rows.price[parent] + price[v]
        parts = [slice(i, i + AT_ONCE) for i in range(0, max(1, len(v)), AT_ONCE)]
        found = [self.bound(step, rows, parent[x], v[x], lo[x], place) for x in parts]
        u, first, whole, late = (np.concatenate(values) for values in zip(*found, strict=True))
        keep = ~late & (paid + to_go[load, lo] + fixed < step.loads.high[load])
        self.seen += len(v)
        parent, v, lo, load = parent[keep], v[keep], lo[keep], load[keep]
        used = rows.used[parent]
        used[np.arange(len(v)), self.at[v]] += self.degree[v]
        return Rows(load, lo, used, paid[keep], u[keep], first[keep], whole[keep], parent)

    def _candidates(
        self, step: Step, rows: Rows, price: Array, to_go: Array, fixed: float
    ) -> tuple[Index, Index, Index]:
        """(row, kind, first layer) of the stages that could come before."""
        V, N = self.kinds.V, len(rows.lo)
        last = step.reach[rows.load[:, None], np.arange(V), rows.lo[:, None]]
        left = (step.loads.high[rows.load] - fixed - rows.price)[:, None] - price
        # `to_go` rises along a row: the largest lo it leaves, for all rows at once by shifting each load's row
        shift = float(np.nanmax(np.where(np.isfinite(to_go), to_go, 0.0), initial=0.0)) + 1.0
        table = np.minimum(to_go[:, : self.L + 1], shift) + np.arange(len(to_go))[:, None] * (shift + 1.0)
        wanted = np.clip(left, -0.5, shift - 0.5) + rows.load[:, None] * (shift + 1.0)
        end = np.searchsorted(table.ravel(), wanted.ravel() + 1e-6).reshape(N, V) - rows.load[:, None] * (self.L + 1)
        room = rows.used[:, self.at] + self.degree <= self.counts[self.at]
        width = np.where(room, np.minimum(end, rows.lo[:, None]) - last, 0).clip(min=0).ravel()
        source = np.repeat(np.arange(N * V), width)
        offset = np.arange(len(source)) - np.repeat(np.cumsum(width) - width, width)
        return self.allowed(source // V, source % V, last.ravel()[source] + offset)

    def allowed(self, row: Index, v: Index, lo: Index) -> tuple[Index, Index, Index]:
        """Those that are cut where cuts are allowed."""
        if self.cuts is None:
            return row, v, lo
        keep = np.isin(lo, self.cuts)
        return row[keep], v[keep], lo[keep]

    def bound(
        self, step: Step, rows: Rows, parent: Index, v: Index, lo: Index, place: int
    ) -> tuple[Array, Array, Array, NDArray[np.bool_]]:
        """u, both g, and what is too late, of rows `parent` with a stage of kind v from layer lo before them."""
        stages, load, hi = self.stages, rows.load[parent], rows.lo[parent]
        i, m, q = step.loads.size[load], step.m[load], step.q[load]
        span = (v * (self.L + 1) + lo) * (self.L + 1) + hi  # of tables [V, lo, hi], as one index
        link = ((i * self.kinds.K + self.at[v]) * stages.masks + stages.mask(rows.used[parent])) * (self.L + 1) + hi
        hop, wire = stages.hop.take(link), stages.wire.take(link)
        away = rows.u[parent] + hop
        part = np.where(q > 0, q * stages.last[0, i], 1.0)  # of u, that the last micro-batch takes
        own, own_whole, through, forward, rest = self._own(step, load, span, place, away, part)
        full = m > 0
        first = np.maximum(own, through + np.maximum(hop + rows.first[parent], (m - 1) * wire + away))
        first = np.where(full, first, 0.0)
        backward = np.where(through < np.inf, through - forward, 0.0)
        smaller = np.where(full, forward + q * stages.last[1, i] * backward, rest)
        last = np.where(q > 0, smaller, through)
        whole = np.maximum(own_whole, last + np.where(q > 0, np.where(full, hop / 2, 0.0), hop) + rows.whole[parent])
        before = np.where(full, stages.least.take(i * (self.L + 1) + lo), 0.0)
        forwards = before * stages.forward_part[i]
        most = np.maximum(first, whole)
        end = np.where(q > 0, np.maximum(first + before, whole + forwards), most + before)
        optimizer, sums = stages.optimizer.take(span), step.sums.take(span)
        least = np.where(lo == 0, sums, step.sums[:, 0, 1].min())
        late = (end + optimizer + least > step.T) | (most + forwards + sums + optimizer > step.T)
        return through + away, first, whole, late | ~np.isfinite(most)

    def _own(
        self, step: Step, load: Index, span: Index, place: int, away: Array, part: Array
    ) -> tuple[Array, Array, Array, Array, Array]:
        """Work and waits of the first m micro-batches and of the whole load; once through; one forward; the work of q
        samples. Infinite where the stage does not fit."""
        stages, i, m, q = self.stages, step.loads.size[load], step.m[load], step.q[load]
        at = i * stages.spans + span
        work, forward, f = stages.work.take(at), stages.forward.take(at), stages.longest_forward.take(at)
        backward, rest = stages.longest_backward.take(at), q * stages.rate.take(at)
        depth = self._depths(step, load, span, place)
        found = None
        for r in (0, 1):
            d = depth[r] if r == 0 else np.where(depth[1] > depth[0], depth[1], 0)
            if r and not d.any():
                break
            again = forward * r
            own = m * (work + again) + wait(away, away, f, backward + again, d, m)
            last = np.where(m > 0, wait(away, part * away, f, backward + again, d, m + (q > 0)), part * away)
            values = own, m * (work + again) + rest + last, work + again
            values = tuple(np.where(d > 0, x, np.inf) for x in values)  # type: ignore[assignment]
            found = values if found is None else tuple(map(np.minimum, found, values))
        assert found is not None
        return *found, forward, rest

    def _depths(self, step: Step, load: Index, span: Index, place: int) -> tuple[Index, Index]:
        """The greatest depths that fit without and with recompute; 0 where none does."""
        stages, n, b = self.stages, step.loads.low[load], step.b[load]
        M = step.m[load] + (step.q[load] > 0)
        held, found = np.minimum(n, b), []
        for r in (0, 1):
            at = r * stages.spans + span
            room = stages.room.take(at) - n * stages.boundary.take(at) - held * stages.transient.take(at)
            depth = np.zeros(len(n), dtype=np.int64)
            if stages.shallow:
                depth = np.where((place < M) & (room >= place * b), place, depth)
            if stages.deep:
                depth = np.where((2 * place - 1 < M) & (room >= (2 * place - 1) * b), 2 * place - 1, depth)
            anyway = stages.all | (place >= M) | (stages.deep & (2 * place - 1 >= M))
            found.append(np.where(anyway & (room >= n), M, depth))
        return found[0], found[1]

    def _merged(self, rows: Rows) -> Rows:
        """One row for each load, first layer and devices: the least of each bound."""
        if not len(rows.lo):
            return rows
        code = (rows.used @ self.radix) % self.codes
        key = (rows.load * (self.L + 1) + rows.lo) * self.codes + code
        order = np.argsort(key, kind="stable")
        key = key[order]
        start = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
        at = order[start]
        price, u, first, whole = (np.minimum.reduceat(x[order], start) for x in rows[3:7])
        return Rows(rows.load[at], rows.lo[at], rows.used[at], price, u, first, whole, rows.made[at])


def wait(first: Array, last: Array, forward: Array, backward: Array, depth: Index, m: Index) -> Array:
    """Idle seconds of a stage while its first and its last micro-batch are downstream for so long."""
    begin = np.maximum(first - (depth - 1) * forward, 0.0)
    end = np.maximum(last - (depth - 1) * backward, 0.0)
    return np.where(depth < m, begin + end, np.maximum(begin, end))
