"""Which pipelines fill a large cluster: a linear program over counts of compositions, and its dual as a proof.

**The bound.** For a step T and plans of R_low to R_high replicas, let N_c be the most samples of a pipeline of
composition c (devices of each class). A plan that ends within T uses y_c pipelines of composition c with

    Σ_c y_c c_k ≤ n_k for every class k,    Σ_c y_c ≤ R_high,    Σ_c y_c N_c ≥ B.

Take any π, ρ ≥ 0 with N_c ≤ π·c + ρ for every composition: then B ≤ Σ_c y_c N_c ≤ π·n + ρ R_high. So if the last is below
B, no plan of these replica counts ends within T. ∎ The prices come from the linear program's dual over the compositions
seen so far; that no other is worth more is what `_columns` shows. The proof is the inequality, so the solver's
tolerance does not matter. A limit on the price per hour is left out, which only lowers the bound."""

from __future__ import annotations

import math
import threading
from typing import NamedTuple

import highspy
import numpy as np
from scipy.optimize import nnls

from hetpipe.partitioners._columns import Column, Columns, Counts, Effort, Step
from hetpipe.partitioners._kinds import Array
from hetpipe.partitioners._loads import COARSE

ROUNDS, GUESSES = 12, 3
ENOUGH = 60  # columns found at a time
GUESS = Effort(columns=ENOUGH, rows=1000)
WIDE, NARROW = 1.05, 1.01  # ratios of the samples of one load, for a guess and for a proof
ALONE = 0.8
BELOW = 1 - 1e-9
LARGE = 300_000  # candidates of one search, at most: more are seen at poor prices only
EACH = 10_000  # candidates that take as long as new prices and the tables of a search
MANY = 1.03  # times the batch: more than a plan does at good prices
SMALL = 0.05  # part of the batch that a price is taken to be worth at least
MARGIN = 1e-3, 1e-5  # of a column's samples, by which its price is more: others like it are worth about as much; and at least


class Prices(NamedTuple):
    """Samples that a device of each class, and a replica, must be worth."""

    device: Array
    replica: float


class Range(NamedTuple):
    """Replica counts."""

    low: int
    high: int


class Master:
    """Linear programs over the columns found so far."""

    def __init__(self, columns: Columns, prices: Prices | None = None) -> None:
        self.columns, self.kinds = columns, columns.kinds
        self.batch = self.kinds.problem.global_batch
        self.most_price = self.kinds.problem.max_price_per_hour or math.inf
        self.counts = np.array(self.kinds.counts, dtype=np.float64)
        self.known: dict[Counts, list[tuple[float, int, Column]]] = {}  # by composition: T, fewest replicas, column
        self.prices = Prices(columns.speeds.max(axis=0), 0.0) if prices is None else prices
        self.used: dict[Counts, float] = {}  # numbers of pipelines in the last linear program
        self._known_step: tuple[tuple[float, int, float], Step] | None = None

    def scaled(self, prices: Prices, high: int) -> Prices:
        """The same in proportion, so that everything there is costs just below one batch."""
        total = float(prices.device @ self.counts) + prices.replica * high
        factor = self.batch / max(total, 1e-300) * BELOW
        return Prices(prices.device * factor, prices.replica * factor)

    def found(self, T: float, R: Range, prices: Prices, effort: Effort, ratio: float) -> tuple[list[Column], bool]:
        """Columns worth more than these prices within T, and whether these are all: if so and there are none, no
        plan ends within T. Loads are looked at in ranges of this ratio first."""
        columns, first = self.columns, WIDE if ratio == WIDE else COARSE
        key = T, R.low, first
        if self._known_step is None or self._known_step[0] != key:
            self._known_step = key, columns.step(T, R.low, first)
        step = self._known_step[1]
        if ratio != first:
            alive = columns.alive(step, prices.device, prices.replica)
            step = columns.step(T, R.low, step.loads.pick(alive).split(ratio))
        found, among, everything = columns.search(step, prices.device, prices.replica, effort)
        if (among.low == among.high).all():
            return found, everything
        # what a range of samples may do, now for each number of samples
        step = columns.step(T, R.low, among.split(1.0))
        found, _, exact = columns.search(step, prices.device, prices.replica, effort)
        return found, everything and exact

    def forget(self) -> None:
        """The tables of the last T, which are large."""
        self._known_step = None

    def look(self, T: float, R: Range, prices: Prices, effort: Effort) -> None:
        """Keep the columns worth more than these prices within T."""
        self.keep(T, R, self.found(T, R, prices, effort, WIDE)[0])

    def guess(self, T: float, R: Range) -> bool:
        """Whether pipelines were seen that could do the batch within T; columns and prices are kept.

        Prices lie between those of the linear program and the best so far (of which no column is worth more than `worth`
        times), which settles sooner than the former alone (Wentges 1997)."""
        center, worth = self.scaled(self.prices, R.high), math.inf
        prices, self.prices = center, center
        for _ in range(GUESSES):
            self.columns.meter.done += EACH
            found = self.found(T, R, prices, GUESS, WIDE)[0]
            if not found:
                self.prices = prices
                return False
            self.keep(T, R, found)
            most = self.worth(found, prices)
            if most < worth:
                center, worth = prices, most
            self.prices = center
            total, new = self.solve(T, R, prices)
            if total >= self.batch:
                return True
            prices = Prices((new.device + center.device) / 2, (new.replica + center.replica) / 2)
        return False

    def impossible(
        self, T: float, R: Range, prices: Prices, candidates: float = math.inf, *, once: bool = False
    ) -> tuple[bool | None, Prices, float]:
        """Whether it is proven that no plan of so many replicas ends within T, before so many candidates were seen; None if
        not, and False if pipelines were seen that could do the batch. Then, the best prices to go on from, and about how many
        times the batch could be done; `once` that is found for good prices, there is no search for better ones.

        Prices tried are the nearest to the best so far of which no known column is worth more."""
        limit, best, worth = self.columns.seen + candidates, prices, math.inf
        for _ in range(ROUNDS):
            near = self.nearest(T, R, best)
            if near is None:
                return False, best, worth
            if self.columns.seen > limit:
                break
            self.columns.count(EACH)
            prices = near
            effort = Effort(columns=ENOUGH, candidates=min(limit, self.columns.seen + LARGE))
            found, all_of_them = self.found(T, R, prices, effort, NARROW)
            if not found:
                return (True, prices, 1.0) if all_of_them else (None, best, worth)
            self.keep(T, R, found)
            if all_of_them and self.worth(found, prices) < worth:
                best, worth = prices, self.worth(found, prices)
            if once and worth < MANY:
                break
        return None, best, worth

    def support(self, T: float, R: Range) -> list[tuple[float, Column]]:
        """Columns that are known to do most samples together, and how many of each."""
        comps, capacity = self._capacity(T, R)
        solved = self.filled(comps, capacity, R.high, Prices(np.zeros(self.kinds.K), 0.0)) if len(comps) else None
        if solved is None:
            return []
        most = self._most(T, R)
        return [(float(y), x) for y, x in zip(solved[0], most, strict=True) if y > 1e-9 and x is not None]

    def inherit(self, T: float, R: Range, columns: list[Column]) -> None:
        """Keep those of these that could be done within T here, too."""
        new = [c for c in columns if all(x.samples < c.samples for x in self._within(T, R, c.used))]
        self.keep(T, R, self.columns.done(T, R.low, new))

    def _within(self, T: float, R: Range, used: Counts) -> list[Column]:
        """Columns of a composition found within T or less beside as many replicas or more."""
        return [c for t, r, c in self.known.get(used, []) if t <= T and R.low <= r]

    def keep(self, T: float, R: Range, found: list[Column]) -> None:
        """Remember these."""
        for column in found:
            self.known.setdefault(column.used, []).append((T, R.low, column))

    def worth(self, found: list[Column], prices: Prices) -> float:
        """The most that any of these is worth, times its price; without end where one costs nothing."""
        costs = [(c.samples, self.price(c.used, prices)) for c in found]
        return max((samples / cost if cost > 0 else math.inf for samples, cost in costs), default=math.inf)

    def shared(self, high: int, share: float) -> Prices:
        """Prices where up to so many replicas are worth this share of the batch."""
        device = self.scaled(self.prices._replace(replica=0.0), 0).device * (1 - share)
        return Prices(device, share * self.batch / high)

    def nearest(self, T: float, R: Range, last: Prices) -> Prices | None:
        """The prices of which no known column is worth more, that differ least from others, in parts of them; None if there are
        none, since the columns could do the batch, or none are found."""
        comps, capacity = self._capacity(T, R)
        own, weight = np.array([*last.device, last.replica]), np.array([*self.counts, R.high])
        unit, each = np.maximum(own, SMALL * self.batch / weight), np.hstack([comps, np.ones((len(comps), 1))])
        most, all_of_it = np.maximum(capacity, 1.0), own @ weight / self.batch - BELOW
        sides = np.vstack([each * unit / most[:, None], np.eye(len(own)), -weight * unit / self.batch])
        for margin in MARGIN:
            least = np.concatenate([(capacity * (1 + margin) - each @ own) / most, -own / unit, [all_of_it]])
            program, one = np.vstack([sides.T, least]), np.eye(len(own) + 1)[-1]
            try:  # Lawson and Hanson 1974, "Solving Least Squares Problems", chapter 23
                rest = program @ nnls(program, one)[0] - one
            except RuntimeError:  # it took too many steps
                continue
            if rest[-1] < -1e-9:
                found = np.maximum(own - rest[:-1] / rest[-1] * unit, 0.0)
                prices = self.scaled(Prices(found[:-1], float(found[-1])), R.high)
                if (comps @ prices.device + prices.replica >= capacity * (1 - 1e-6)).all():
                    return prices
        return None

    def _most(self, T: float, R: Range) -> list[Column | None]:
        """Of each composition that is known, the column of most samples."""
        return [max(self._within(T, R, used), key=lambda c: c.samples, default=None) for used in self.known]

    def _capacity(self, T: float, R: Range) -> tuple[Array, Array]:
        """Compositions [N, K] and the most samples of columns found within T or less beside as many replicas or more."""
        found = [0 if column is None else column.samples for column in self._most(T, R)]
        return np.array(list(self.known), dtype=np.float64).reshape(-1, self.kinds.K), np.array(found, dtype=np.float64)

    @staticmethod
    def price(used: Counts, prices: Prices) -> float:
        """What a pipeline of these devices costs."""
        return float(prices.device @ np.array(used)) + prices.replica

    def solve(self, T: float, R: Range, last: Prices) -> tuple[float, Prices]:
        """The most samples of the columns that are known, and the dual prices."""
        comps, capacity = self._capacity(T, R)
        solved = self.filled(comps, capacity, R.high, last)
        if solved is None:
            return 0.0, last
        y, prices = solved
        self.used = {c: float(x) for c, x in zip(self.known, y, strict=True) if x > 1e-9}
        return float(capacity @ y), prices

    def filled(self, comps: Array, capacity: Array, high: int, last: Prices) -> tuple[Array, Prices] | None:
        """Numbers of up to `high` pipelines of these compositions [N, K] that do the most samples, and the dual prices; None
        if the solver fails. Devices may also be left alone at a part of their last price, which keeps prices of all of them in
        the dual while few compositions are known."""
        devices = np.vstack([comps, np.eye(self.kinds.K)])
        value = np.concatenate([capacity, last.device * ALONE])
        rows = np.vstack([devices.T, np.arange(len(devices)) < len(comps)])
        solved = _solved(-value, rows, np.array([*self.counts, high]))
        if solved is None:
            return None
        duals = np.maximum(-solved[1], 0.0)
        return solved[0][: len(comps)], self.scaled(Prices(duals[:-1], float(duals[-1])), high)


class _Solver(threading.local):
    """HiGHS, one for each thread, without a log; programs here have a few rows, which presolve would not make fewer."""

    def __init__(self) -> None:
        self.highs = highspy.Highs()
        self.highs.setOptionValue("output_flag", False)
        self.highs.setOptionValue("presolve", "off")
        self.highs.setOptionValue("solver", "simplex")


_SOLVER = _Solver()


def _solved(cost: Array, rows: Array, most: Array) -> tuple[Array, Array] | None:
    """x ≥ 0 of least cost with rows x ≤ most, and the dual values, none above 0; None if the solver fails. As
    `scipy.optimize.linprog`, in a sixth of the time."""
    program, (m, n) = highspy.HighsLp(), rows.shape
    program.num_col_, program.num_row_ = n, m
    program.col_cost_, program.col_lower_, program.col_upper_ = cost, np.zeros(n), np.full(n, highspy.kHighsInf)
    program.row_lower_, program.row_upper_ = np.full(m, -highspy.kHighsInf), most
    matrix = program.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_, matrix.index_, matrix.value_ = np.arange(0, m * n + 1, n), np.tile(np.arange(n), m), rows.ravel()
    solver = _SOLVER.highs
    solver.passModel(program)
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    found = solver.getSolution()
    return np.array(found.col_value), np.array(found.row_dual)
