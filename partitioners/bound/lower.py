"""A step that no plan is below: for a step T and R replicas, a linear program over relaxed pipelines, priced by `relaxed`.

Say a plan of R replicas ends within T. Replica r does n_r ≥ 1 samples, Σ n_r = B, and takes a_r of what there is, Σ a_r ≤ A.
For any prices π ≥ 0 let c(n) be the least price of a relaxed pipeline that does n samples within T beside R − 1 others: then
c(n_r) ≤ π·a_r, so Σ c(n_r) ≤ π·A. As c does not fall with n, no R numbers whose sum is B have a lesser Σ c(n_r) than R · ĉ(B /
R), where ĉ is the largest convex function below c. **So if R · ĉ(B / R) > π·A for every R of a range, T is ruled out for it.**
c is computed for ranges of samples: it is at least that of the least samples, and counts as that of the most. Ranges on which ĉ
rests are divided.

Where a step is known that the bound is to be compared with, each range of R begins at what its nodes allow (`nodes`).

The prices come from the linear program over the pipelines found so far: the least part z of all devices with which they do the
batch. z ≤ 1 says that T cannot be ruled out so. The least T of all ranges of R is the bound; ranges at which it rests are
divided."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners.bound import relaxed
from hetpipe.partitioners.bound.demand import Demand
from hetpipe.partitioners.bound.labels import label_space
from hetpipe.partitioners.bound.nodes import NodeBound
from hetpipe.partitioners.stage_kinds.types import Types
from hetpipe.planning.partition import never
from hetpipe.planning.programs import Program

Array = NDArray[np.float64]
Index = NDArray[np.int64]
SLACK = 1 + 1e-9  # bounds are sums in another order than the simulator's
APART, BOUND_END = 1.2, 1.004  # possible over ruled out: where all replica counts have their turn, at first; where it ends
WIDER = 2  # most of a range of replicas is less than so many times its least
GRID = 9  # ranges of samples at first
NARROW = 1.01  # most of a range of samples, times its least, that is not divided
ROUNDS = 40  # of prices for one T
EXACT, SUMS = 6, 500  # replicas up to which sums are exact, but for so many parts of the batch
FAR = 1.05  # z from which on ranges of samples are left as they are, and prices go on
PATIENCE = 0.25  # of the effort, for one T
SMOOTH = 0.5  # of new prices, beside the best so far


class Column(NamedTuple):
    """A relaxed pipeline: stages of each kind and the kind of each, for `low` to `high` samples in micro-batches of b."""

    take: tuple[int, ...]
    line: tuple[int, ...]
    low: int
    high: int
    b: int


@dataclass(eq=False)
class Part:
    """Plans of `low` to `high` replicas: a T that is ruled out, one that cannot be, and with how many replicas it was nearest."""

    low: int
    high: int
    shown: float
    possible: float = math.inf
    R: int = 0
    stuck: int = 0  # how often it took too long to say
    by_nodes: bool = False  # whether `shown` is at least the bound of `nodes`
    prices: Array | None = None
    near: list[int] = field(default_factory=list)  # samples on which the bound rested
    columns: dict[Column, None] = field(default_factory=dict)  # the best first


class Lower:
    """The bound of one problem, whose step is at least `least` anyway. Effort is counted in labels that `relaxed` joins."""

    def __init__(self, types: Types, least: float, late: Callable[[], bool] = never) -> None:
        self.types, self.demand, self.late = types, Demand(types), late
        self.batch = types.problem.global_batch
        self.takes, self.there = types.limits
        self.left = self.stop = 0.0
        self.space, self.nodes = label_space(types.L), NodeBound(types, late)
        self.parts = self._ranges(least)

    def _ranges(self, least: float) -> list[Part]:
        """The parts that all replica counts are divided into; one replica, which sums nothing, and as many as a node has devices
        or fewer, which may sum inside nodes, apart."""
        found, low = list[Part](), 1
        while low <= self.types.most:
            high = min(self.types.most, max(low, WIDER * low - 1))
            if low <= self.types.largest_node < high:
                high = self.types.largest_node
            found.append(Part(low, high, least))
            low = high + 1
        return found

    @property
    def bound(self) -> float:
        """A step that is ruled out for all replica counts."""
        return min(part.shown for part in self.parts)

    def run(self, step: float, effort: float) -> float:
        """The bound, after so much more effort; of no use above `step`. The replica counts at which it rests are looked at until
        it is known how far it could rise there, then all others are brought as far, and so on, closer each time. After a part of
        it (`PATIENCE`) for one T others have their turn."""
        if self.bound <= 0:  # each layer is free on some type: there is no T to begin with
            return 0.0
        self.left, last, apart = effort, None, APART
        for part in self.parts:
            part.stuck = 0
        self._by_nodes(step)
        while self.left > 0 and self.bound < step * (1 - 1e-9) and not self.late():
            upper = min([step, *(x.possible for x in self.parts)])
            part = min(self.parts, key=lambda x: (x.possible, x.stuck, x.shown))
            behind = [x for x in self.parts if x.shown < part.shown]
            if part.shown * (BOUND_END if math.isinf(part.possible) else apart) < upper and not (part.stuck and behind):
                T = math.sqrt(part.shown * upper) if math.isfinite(upper) else part.shown * 2
            elif behind:
                T, part = part.shown, min(behind, key=lambda x: (x.stuck, x.shown))
            elif apart > BOUND_END:
                apart = max(BOUND_END, math.sqrt(apart))
                continue
            elif part.low == part.high or part.possible > upper:
                break
            else:
                self._divide(part)
                self._by_nodes(step)
                continue
            part.prices = last if part.prices is None else part.prices
            self.stop = self.left - PATIENCE * effort
            if self.ruled_out(part, T):
                part.shown, part.stuck = T, 0
            elif self.left > max(0.0, self.stop):
                part.possible = T
            else:
                part.stuck += 1
            last = part.prices
        return self.bound

    def _by_nodes(self, step: float) -> None:
        """Raise what is shown of all parts to the bound of their nodes, if there is a step to compare it with."""
        for part in self.parts if math.isfinite(step) else ():
            if not part.by_nodes:
                part.shown, part.by_nodes = self.nodes.bound(part.low, part.high, part.shown, step), True

    def _divide(self, part: Part) -> None:
        """Put two halves of the part in its place."""
        middle, at = (part.low + part.high) // 2, self.parts.index(part)
        halves = ((part.low, middle), (middle + 1, part.high))
        self.parts[at : at + 1] = [
            Part(
                low,
                high,
                part.shown,
                prices=part.prices,
                near=part.near,
                R=min(high, max(low, part.R)),
                by_nodes=part.by_nodes and low == part.low,  # more replicas sum more
                columns=dict(part.columns),
            )
            for low, high in halves
        ]

    def ruled_out(self, part: Part, T: float) -> bool:
        """Whether T is ruled out for these replica counts."""
        ends = np.unique(np.concatenate([np.geomspace(1, self.batch - part.low + 1, GRID).round(), part.near])).astype(int)
        intervals = list(zip([1, *(ends[:-1] + 1).tolist()], ends.tolist(), strict=True))
        prices = part.prices if part.prices is not None else self.first()
        best, columns = 0.0, dict[Column, None]()
        for _ in range(ROUNDS):
            if self.left <= max(0, self.stop) or self.late():
                return False
            value, found, intervals = self.value(part, T, prices, intervals)
            if value > best:
                best, part.prices = value, prices
            columns |= dict.fromkeys(found)
            part.columns = {**dict.fromkeys(found), **part.columns}
            if value > SLACK:
                return True
            if not columns:  # the effort ended before any was found
                return False
            z, dual, columns, intervals = self.program(part, columns, intervals)
            dual = dual / (dual @ self.there)
            if z <= SLACK:  # few replicas may still not be able to: parts of pipelines could
                return part.low <= EXACT and self.value(part, T, dual, intervals)[0] > SLACK
            prices = dual if best == 0 or part.prices is None else SMOOTH * dual + (1 - SMOOTH) * part.prices
            prices = prices / (prices @ self.there)
        return False

    def first(self) -> Array:
        """Prices, before the linear program says any: of all that there is as much."""
        return 1.0 / self.there / len(self.there)

    def value(
        self, part: Part, T: float, prices: Array, intervals: list[tuple[int, int]]
    ) -> tuple[float, list[Column], list[tuple[int, int]]]:
        """The least R · ĉ(B / R) / π·A of all R of the part, the cheapest pipelines, and the ranges of samples, divided where it
        rests, as long as that could be enough. Only ranges on which it rests are priced; of others c is what the work of their
        samples costs at least, or that of fewer samples."""
        scale, priced = float(prices @ self.there), dict[int, tuple[float, Column]]()
        each, exact = self.demand.cheapest_sample(prices @ self.takes) / (T * SLACK), False
        while True:
            costs = np.array([priced[low][0] if low in priced else each * low for low, _ in intervals])
            costs = np.maximum.accumulate(costs)
            value, part.R, at = least_sum(
                np.array([high for _, high in intervals]), costs, self.batch, part.low, part.high, exact
            )
            unknown = [intervals[i] for i in sorted(at) if intervals[i][0] not in priced]
            for low, high in unknown:
                priced[low] = self.cheapest(part, T, prices, low, high, scale * SLACK)
            if unknown and self.left > 0:
                continue
            wide = {i for i in at if intervals[i][1] > max(intervals[i][0], NARROW * intervals[i][0])}
            part.near = [x for i in at for x in (intervals[i][0] - 1, intervals[i][1]) if x > 0]
            if value <= scale * SLACK and not wide and not exact and part.low <= EXACT:
                exact = True
                continue
            if value > scale * SLACK or not wide or self.left <= 0 or self.hopeless(part, priced, scale * SLACK):
                found = [column for cost, column in priced.values() if math.isfinite(cost)]
                return value / scale, found, intervals
            intervals = [half for i, x in enumerate(intervals) for half in (halves(*x) if i in wide else [x])]

    def hopeless(self, part: Part, priced: dict[int, tuple[float, Column]], enough: float) -> bool:
        """Whether pipelines that were priced, of the least samples of their ranges, do the batch for no more: then dividing
        ranges does not make the least sum more than `enough`, but for what a price rises when its range gets narrower."""
        samples, costs = np.array([(low, cost) for low, (cost, _) in priced.items()]).T
        return least_sum(samples, costs, self.batch, part.low, part.high, part.low <= EXACT)[0] <= enough

    def cheapest(self, part: Part, T: float, prices: Array, low: int, high: int, below: float) -> tuple[float, Column]:
        """The least price of a pipeline of so many samples, and one of that price; infinite where there is none `below` this."""
        each, best, column, one = prices @ self.takes, math.inf, Column((), (), low, high, 0), set[int]()
        for b in self.demand.sizes:
            usable = self.demand.usable(b)
            if b > high and set(usable.tolist()) <= one:  # it is one micro-batch, as with the b above before
                continue
            one |= set(usable.tolist()) if b > high else set()
            found = relaxed.cheapest(
                self.demand.load(b, low, high, part.low),
                each[usable],
                self.demand.memory(b),
                self.types.optimizer[usable],
                T * SLACK,
                min(best, below),
                self.demand.blocking,
                self.demand.gpipe,
                self.space,
            )
            self.left -= found.effort
            if found.price < best:
                line = usable[found.kinds]
                take = np.bincount(line, minlength=self.types.V)
                best, column = found.price, Column(tuple(take.tolist()), tuple(line.tolist()), low, high, b)
        return best, column

    def program(
        self, part: Part, columns: dict[Column, None], intervals: list[tuple[int, int]]
    ) -> tuple[float, Array, dict[Column, None], list[tuple[int, int]]]:
        """The least part z of what there is, its prices, the columns, and the ranges of samples, divided where it rests on wide
        ones."""
        while True:
            ends = np.array([high for _, high in intervals])
            columns = {x._replace(high=int(ends[np.searchsorted(ends, x.low)])): None for x in columns}
            every = list(columns)
            uses = np.array([self.takes @ np.array(x.take) for x in every]).T
            samples, one = np.array([x.high for x in every], dtype=np.float64), np.ones(len(every))
            rows = np.vstack([uses.reshape(len(self.there), -1), samples, one])
            last, none = np.append(-self.there, np.zeros(2)), np.zeros_like(self.there)
            low, high = np.append(none - np.inf, [self.batch, part.low]), np.append(none, [np.inf, part.high])
            found = Program(np.hstack([rows, last[:, None]]), low, high).least(np.append(0 * one, 1.0))
            if found is None:
                return math.inf, self.first(), columns, intervals
            used = [x for x, y in zip(every, found.x[:-1], strict=True) if y > 1e-7]
            part.columns = {**dict.fromkeys(used), **part.columns}
            wide = {(x.low, x.high) for x in used if x.high > max(x.low, NARROW * x.low)} & set(intervals)
            if found.cost > FAR or not wide:
                return found.cost, -found.prices[: len(self.there)], columns, intervals
            intervals = [half for x in intervals for half in (halves(*x) if x in wide else [x])]


def halves(low: int, high: int) -> list[tuple[int, int]]:
    """Two ranges that a range of samples is divided into."""
    middle = math.isqrt(low * high) if high > 2 * low else (low + high) // 2
    return [(low, middle), (middle + 1, high)]


def least_sum(samples: Array, costs: Array, batch: int, low: int, high: int, exact: bool) -> tuple[float, int, set[int]]:
    """The least cost of R points (samples, cost) whose samples are the batch or more, for R from `low` to `high`; that R, and
    some of these points. The hull's R · ĉ(B / R), which is not above it, or if `exact` it itself for few."""
    ok = np.nonzero(np.isfinite(costs))[0]
    best, at, points = math.inf, low, set[int]()
    for R in range(low, high + 1 if len(ok) else low):
        cost, on = (_exact if exact and R <= EXACT else _hull)(samples[ok], costs[ok], batch, R)
        if cost < best:
            best, at, points = cost, R, {int(ok[i]) for i in on}
    return best, at, points


def _hull(samples: Array, costs: Array, batch: int, R: int) -> tuple[float, set[int]]:
    """R · ĉ(B / R), and on which points it rests."""
    mean = batch / R
    below, above = np.nonzero(samples < mean)[0], np.nonzero(samples >= mean)[0]
    if not len(above):
        return math.inf, set()
    i = int(above[costs[above].argmin()])
    best, points = float(costs[i]), {i}
    if len(below):
        part = (mean - samples[below])[:, None] / (samples[above][None] - samples[below][:, None])
        mixed = costs[below][:, None] * (1 - part) + costs[above][None] * part
        i, j = divmod(int(mixed.argmin()), mixed.shape[1])
        if mixed[i, j] < best:
            best, points = float(mixed[i, j]), {int(below[i]), int(above[j])}
    return R * best, points


def _exact(samples: Array, costs: Array, batch: int, R: int) -> tuple[float, set[int]]:
    """The least cost of R points, and which: one more at a time, of sums about as large the least cost with the largest sum."""
    step = max(1.0, batch / SUMS)
    done, spent, chosen = np.zeros(1), np.zeros(1), list[tuple[NDArray[np.int64], NDArray[np.int64]]]()
    for _ in range(R):
        total = np.minimum(batch, np.ceil((done[:, None] + samples).ravel() / step) * step)
        price = (spent[:, None] + costs).ravel()
        order = np.lexsort((price, -total))
        least = np.minimum.accumulate(price[order])
        kept = order[np.append(True, least[1:] < least[:-1])]
        chosen.append(divmod(kept, len(samples)))
        done, spent = total[kept], price[kept]
    if done[0] < batch:
        return math.inf, set()
    at, points = 0, set[int]()
    for before, point in reversed(chosen):
        points.add(int(point[at]))
        at = int(before[at])
    return float(spent[0]), points
