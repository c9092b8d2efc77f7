"""The pipelines that are worth their price: the columns of the counted planner.

Given a step T, a price π_k for every device of class k and ρ for a replica, `search` lists every pipeline that could
do more samples within T than its devices cost, n > π·c + ρ, told apart by its devices c. It puts stages on from the
last to the first, all partial pipelines ("rows") of all loads at once, and keeps with each a bound on its time. The loops
are compiled (`_enumerate`).

**Loads.** A load is a micro-batch size b and a range of samples [n₁, n₂]. A pipeline of n ≥ n₁ samples does m = ⌊n₁ / b⌋
full micro-batches and, if q = n₁ mod b > 0, another of q to b samples. Take away all others: a longest path does not grow
when nodes are taken out. The last one takes F' and B', the least of any size from q to b (`Stages.smaller`), or F and B if q = 0.

**The bound.** Let u be the time of one micro-batch from the end of its forward on the stage before, down to the last
stage and back (u' that of the last one), and g the time from a stage's first forward to its last backward. With depth w,

    g_s ≥ x + wait,    g_s ≥ F + B' + hop + g_{s+1},    g_s ≥ F + B + (m − 1)·wire + hop + u

- The stage does its own work x, and waits: with w < M (micro-batches in all) at most w − 1 forwards can be done while the first
  micro-batch is away (idle ≥ u − (w − 1)F), and at most w − 1 backwards while the last one is (idle ≥ u' − (w − 1)B);
  the first gap ends before the second begins. With w = M they are one gap, and the larger counts. In a gpipe replica no
  stage has a backward before its last forward: idle ≥ u'.
- All that stage s + 1 does happens between its first activation and its last gradient.
- The link carries all m activations one after the other, and the last one goes down and back.

A stage also waits for activations where one before it has slower forwards, and for gradients of the last micro-batches
where one has slower backwards. So for some e (`EARLY`) these are kept, too: h, from the start of forward e to the last backward,
and d, from the first forward to the end of backward m − 1 − e. Of the stage's own work c = max(e − w + 1, 0) backwards
come before forward e, and as many forwards of full micro-batches after that backward, so that

    h_s ≥ x − eF − cB + (the wait for the last one),    h_s ≥ F + B' + hop + h_{s+1},    g_s ≥ eF + cB + h_s
    d_s ≥ x' − eB − cF + (the wait for the first one),  d_s ≥ F + B + hop + d_{s+1},     g'_s ≥ eB + cF + d_s

where g' ends with the last backward of the m full ones, and x' leaves out the last one, but for F' where that comes before
the backward. A replica has one family of depths: all of these hold for each, at the depth that it has at this place (without
recompute if that fits in memory, else with it), and the least over families is kept. Let y be the time from the first forward
of the row to the end of all gradient sums of its stages, and of those that wait for them (`_chains`):

    y_s ≥ F + hop / 2 + y_{s+1} + (the sums of stage s, if they wait for those above),    y_s ≥ g_s + sums_s

Then

    least time once through the layers before s + g_s + optimizer_s + least sums of a first stage ≤ T,
    least forwards before s + y_s + (the sums below, if they wait for these) + optimizer_s ≤ T

(and so for g') for every pipeline of a plan that ends within T: sums start when the backwards of all owners have ended, and
optimizers when all sums have. Of rows with the same load, devices and first layer only the least of each value is kept,
apart. All of this only relaxes, so nothing that fits is lost.

**Prices.** A row is given up when its price, and the least that the layers left must cost, reach n₂ − ρ. The latter is a
shortest path over stages that could fit within T by their own work (with recompute, if the least that they may have in flight
needs it), once through the layers before them and back, and the sums that wait for theirs; and that take the first forward
and the last backward through in the time that the row leaves: cheap devices are slow, so the less time is left, the more the
layers before must cost. Times beyond the least are counted in parts of WIDTH · T, rounded down, which only relaxes. Few rows
survive when the prices are those of a nearly optimal linear program, which is why pipelines of any length and any mix can be
told apart.

Loads are searched in parts, side by side: each has its share of the limits, so what is found does not depend on the number
of processors.

Transfers that do not overlap compute (`runtime_overhead`) lengthen the actions at both ends instead, and the step is
no shorter: the bound holds."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners import _enumerate
from hetpipe.partitioners._chains import Chains, Gaps
from hetpipe.partitioners._enumerate import LO, LOAD, SLACKS, USED, VALUES, End, Found, Given, Tables
from hetpipe.partitioners._kinds import Array
from hetpipe.partitioners._limit import Meter
from hetpipe.partitioners._loads import Index, Loads, all_loads
from hetpipe.partitioners._space import FORWARDS
from hetpipe.partitioners._stages import Stages
from hetpipe.planning.workers import cores

PARTS, FEW, MANY = 4, 16, 250  # of the loads, side by side; fewest of all, and most of one: the same whatever the machine
ASKED = 20_000  # candidates of one composition, where it is asked for
BUDGET = 1_000_000_000  # price of all devices that a pipeline is to be made of, by their speeds
TINY = 1e-200  # samples per second: of devices that can do none
TABLE = 100  # candidates that take as long as the table of prices of one load
SLACK = 1 + 1e-9  # bounds are sums in another order than the simulator's
Counts = tuple[int, ...]
Out = TypeVar("Out")


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


class Step(NamedTuple):
    """What a search at one T is about: loads, for the compiled loops too; the end of the step; and the first layer that a
    stage which ends at hi can reach back to [G, V, hi]."""

    loads: Loads
    given: Given
    end: End
    reach: Index

    def pick(self, rows: NDArray[np.bool_] | slice) -> Step:
        """Some of the loads."""
        given = Given._make(np.ascontiguousarray(x[rows]) for x in self.given)
        return Step(self.loads.pick(rows), given, self.end, np.ascontiguousarray(self.reach[rows]))

    def rows(self) -> list[slice]:
        """Which loads are in each part."""
        loads = len(self.loads.low)
        number = max(PARTS, math.ceil(loads / MANY)) if loads >= FEW else 1
        return [slice(i, None, number) for i in range(number)]

    def parts(self) -> list[Step]:
        """Parts of the loads that take about as long, or all of them if they are few."""
        return [self.pick(rows) for rows in self.rows()]


def each(function: Callable[[Step], Out], parts: list[Step]) -> list[Out]:
    """Of every part, side by side: compiled loops let other threads run."""
    return [function(parts[0])] if len(parts) == 1 else list(threads().map(function, parts))


@cache
def threads() -> ThreadPoolExecutor:
    """As many as there are parts, and processors that this process may use."""
    return ThreadPoolExecutor(max_workers=min(PARTS, cores()))


class Columns:
    """The enumeration over one problem."""

    def __init__(self, stages: Stages) -> None:
        self.stages, self.kinds, self.L = stages, stages.kinds, stages.L
        self.at, self.degree = self.kinds.at, self.kinds.degree
        _enumerate.ready()
        self.chains = Chains(self.kinds)
        self.tables = self._tables()
        self.coarse = all_loads(stages, self.kinds.problem.global_batch)
        self.held = _enumerate.held(self.tables, self.given(self.coarse))
        self._ranges: dict[float, tuple[Loads, Given]] = {}
        self.cuts: tuple[int, ...] | None = None
        self.common: tuple[int, ...] | None = ()
        self.gaps = self.chains.all
        self.begin = self.chains.begin(self.gaps)
        self.seen = 0  # candidates so far
        self.meter = Meter()  # those of all that were made of this one, too

    def count(self, candidates: int) -> None:
        """So many more candidates, or what takes as long."""
        self.seen += candidates
        self.meter.done += candidates

    def cut_at(self, cuts: tuple[int, ...], common: tuple[int, ...] | None) -> Columns:
        """The same, of pipelines that are cut at these layers only (with 0 and L), and at all of `common` of them, whose
        sums are then known. None: at any of them, but with sums as if all were cut at all, which is no more than hoped."""
        found = copy.copy(self)
        found.cuts, found.common, found.seen = cuts, common, 0
        chain = np.array([0, *sorted(common or ())])
        found.begin = np.tile(chain[np.searchsorted(chain, np.arange(self.L + 1)) - 1], (self.kinds.V, 1))
        return found

    def within(self, gaps: Gaps) -> Columns:
        """The same, of pipelines of such plans."""
        found = copy.copy(self)
        found.gaps, found.begin, found.seen = gaps, self.chains.begin(gaps), 0
        return found

    def loads(self, ratio: float) -> tuple[Loads, Given]:
        """All loads, in ranges of at most this ratio."""
        if ratio not in self._ranges:
            loads = self.coarse.split(ratio)
            self._ranges[ratio] = loads, self.given(loads)
        return self._ranges[ratio]

    @property
    def layers(self) -> Index:
        """Where stages may begin or end."""
        return np.arange(self.L + 1) if self.cuts is None else np.array(self.cuts)

    @property
    def allowed(self) -> NDArray[np.bool_]:
        """The same, as [L + 1] flags."""
        found = np.zeros(self.L + 1, dtype=np.bool_)
        found[self.layers] = True
        return found

    def sums(self, R: int) -> Array:
        """Least seconds [V, lo, hi] of a stage's gradient sums."""
        if self.cuts is None:
            return self.kinds.sum_floor(R)
        common = tuple(self.cuts[1:-1]) if self.common is None else self.common
        return np.repeat(self.kinds.sums(R, self.cuts, common)[None], self.kinds.V, axis=0)

    def _tables(self) -> Tables:
        stages = self.stages
        times = [stages.work, stages.forward, stages.longest_forward, stages.longest_backward]
        memory = [table[r] for r in (0, 1) for table in (stages.room, stages.boundary, stages.transient)]
        return Tables(
            times=np.ascontiguousarray(np.stack(times, axis=-1).swapaxes(2, 3)),
            places=np.ascontiguousarray(np.stack([*memory, stages.optimizer], axis=-1).swapaxes(1, 2)),
            links=np.stack([stages.hop, stages.wire], axis=-1),
            smaller=np.ascontiguousarray(stages.smaller.swapaxes(2, 3)), least=np.ascontiguousarray(stages.least[:, :, 1]),
            shorter=stages.shorter,
            usable=stages.usable,
            at=self.at, degree=self.degree,
            forwards=np.array([FORWARDS[f] for f in stages.families if f in FORWARDS], dtype=np.int64),
            gpipe="gpipe" in stages.families, masked=stages.masked, overhead=stages.overhead,
        )  # fmt: skip

    def given(self, loads: Loads) -> Given:
        """As the compiled loops have them."""
        size, low, high = map(np.ascontiguousarray, loads[:3])
        stages, b = self.stages, np.array(self.stages.sizes)[size]
        m, q = low // b, low % b
        knots = np.array([*stages.knots, math.inf])
        knot = np.maximum(np.searchsorted(knots, q, side="right") - 1, 0)
        part = np.where(q > 0, (q - knots[knot]) / (knots[knot + 1] - knots[knot]), 0.0)
        after = np.minimum(knot + 1, len(stages.knots) - 1)
        few = stages.least_smaller[knot] + part[:, None, None] * (stages.least_smaller[after] - stages.least_smaller[knot])
        whole = stages.least[size]
        once = np.stack([np.where(m[:, None] > 0, whole[:, :, 0], few[:, :, 0]),
                         np.where(q[:, None] > 0, few[:, :, 1], whole[:, :, 1])], axis=-1)  # fmt: skip
        return Given(size, low, high, b, m, q, knot, part, once)

    # -- stages by themselves -------------------------------------------------------------------------------

    def step(self, T: float, R: int, which: Loads | float) -> Step:
        """What can be done within T beside R − 1 other replicas, by the work, memory and sums of single stages: with these loads,
        or all in ranges of at most this ratio."""
        loads, given = (which, self.given(which)) if isinstance(which, Loads) else self.loads(which)
        end, held = self.end(T, R), np.ascontiguousarray(loads.held)
        return Step(loads, given, end, _enumerate.reach(self.tables, given, end, self.held, held, self.layers, self.begin))

    def end(self, T: float, R: int) -> End:
        """Of a step beside R − 1 other replicas."""
        sums, L = self.sums(R), self.L
        seconds, chained, below = np.zeros((L + 1, L + 1)), np.full(L + 1, L + 1), np.zeros(L + 1)
        if self.cuts is None:
            seconds, chained = self.chains.seconds(R), self.chains.below(self.gaps)
            known = np.flatnonzero(chained <= L)
            below[known] = seconds[known, chained[known]]
        least = float(sums[:, 0, 1].min())
        return End(T * SLACK, np.ascontiguousarray(sums.swapaxes(1, 2)), least, seconds, chained, below)

    def to_go(self, step: Step, prices: Array, fixed: float) -> tuple[Array, NDArray[np.bool_]]:
        """The least price of layers [0, hi) and of a replica; and which loads may be worth more than their price."""
        slacks = SLACKS if self.cuts is None else 1
        return _enumerate.to_go(self.tables, *step[1:], prices[self.at] * self.degree, fixed, self.layers, slacks)

    def alive(self, step: Step, prices: Array, fixed: float) -> NDArray[np.bool_]:
        """Loads that may be worth more than their price, by work and time alone."""
        alive = np.zeros(len(step.loads.low), dtype=bool)
        parts = step.parts()
        for rows, found in zip(step.rows(), each(lambda part: self.to_go(part, prices, fixed)[1], parts), strict=True):
            alive[rows] = found
        self.count(TABLE * int(alive.sum()))
        return alive

    @cached_property
    def speeds(self) -> Array:
        """How many samples per second one device of each class does alone at each micro-batch size [sizes, K], memory aside."""
        seconds = np.maximum(self.stages.work[:, :, 0, self.L], 1e-300)
        rates = np.where(self.stages.usable, np.array(self.stages.sizes)[:, None] / seconds, 0.0)
        best = np.zeros((len(rates), self.kinds.K))
        for v, k in enumerate(self.at):
            best[:, k] = np.maximum(best[:, k], rates[:, v] / self.degree[v])
        return best

    @staticmethod
    def budget(speeds: Array, used: Index) -> Array:
        """Prices of a device of each class, in proportion to these speeds, at which the dearest of compositions [..., K] costs
        BUDGET: layers left to these devices must not cost more than those left of them."""
        return speeds * (BUDGET / max(float((used @ speeds).max()), TINY))

    def worth(self, T: float, R: int, ratio: float, prices: Array, fixed: float) -> Columns:
        """The same, of those loads in ranges of this ratio that may be worth more than their price within T."""
        step, found = self.step(T, R, ratio), copy.copy(self)
        step = step.pick(self.alive(step, prices, fixed))
        found._ranges, found.seen = {ratio: (step.loads, step.given)}, 0
        return found

    def nothing(self, step: Step) -> tuple[Index, Array]:
        """A partial pipeline without stages of each load: rows, and their values, as `_enumerate` has them."""
        rows = np.zeros((len(step.loads.low), USED + self.kinds.K), dtype=np.int64)
        rows[:, LOAD], rows[:, LO] = np.arange(len(rows)), self.L
        return rows, np.zeros((len(rows), VALUES))

    def extended(
        self, step: Step, limit: Index, rows: Index, values: Array, place: int, prices: Array, to_go: Array
    ) -> tuple[Index, Array, int]:
        """These with every stage more that the step and prices allow, of up to so many devices of each class; and how many were
        looked at."""
        limit, price = np.tile(limit, (len(step.loads.low), 1)), prices[self.at] * self.degree
        return _enumerate.extended(self.tables, *step[1:], self.allowed, price, to_go, limit, rows, values, place, math.inf)

    # -- the enumeration ------------------------------------------------------------------------------------

    def search(self, step: Step, prices: Array, fixed: float, effort: Effort) -> tuple[list[Column], Loads, bool]:
        """Compositions of pipelines that could be worth more than their price, with their most samples; the loads of
        all such pipelines; and whether these are all, or the limits of `effort` left some out."""
        parts = step.parts() if effort.rows == math.inf else [step]
        most = effort.columns / len(parts), (effort.candidates - self.seen) / len(parts), effort.rows / len(parts)
        found = each(lambda part: self._search(part, prices, fixed, most), parts)
        self.count(sum(part.seen for part, _ in found))
        columns: dict[Counts, Column] = {}
        for part, _ in found:
            for used, samples, size in zip(part.used.tolist(), part.samples.tolist(), part.size.tolist(), strict=True):
                column = Column(tuple(used), samples, size)
                if column.samples > columns.get(column.used, column._replace(samples=0)).samples:
                    columns[column.used] = column
        hit = Loads(*map(np.concatenate, zip(*(loads for _, loads in found), strict=True)))
        return list(columns.values()), hit, all(part.complete for part, _ in found)

    def done(self, T: float, R: int, columns: list[Column]) -> list[Column]:
        """Those of these whose devices, or fewer, could do as many samples within T, as far as was looked."""
        if not columns:
            return []
        size, samples, used = (np.array(x) for x in zip(*((x.size, x.samples, x.used) for x in columns), strict=True))
        held = np.array([self.coarse.row(x.size, x.samples) for x in columns])
        prices = self.budget(self.speeds.max(axis=0), used)
        step = self.step(T, R, Loads(size, samples, np.ceil(used @ prices).astype(np.int64) + 1, held))
        to_go, _ = self.to_go(step, prices, 0.0)
        most = math.inf, float(ASKED * len(columns)), math.inf
        found = _enumerate.search(self.tables, *step[1:], self.allowed, used, prices[self.at] * self.degree, to_go, most)
        self.count(found.seen + TABLE)
        return [x for x, hit in zip(columns, found.hit, strict=True) if hit]

    def _search(self, step: Step, prices: Array, fixed: float, most: tuple[float, float, float]) -> tuple[Found, Loads]:
        """What is found in one part of the loads, and the loads of that."""
        to_go, alive = self.to_go(step, prices, fixed)
        step, price = step.pick(alive), prices[self.at] * self.degree
        limit = np.tile(self.kinds.counts, (len(step.loads.low), 1))
        found = _enumerate.search(self.tables, *step[1:], self.allowed, limit, price, to_go[alive], most)
        return found._replace(seen=found.seen + TABLE * len(step.loads.low)), step.loads.pick(found.hit)
