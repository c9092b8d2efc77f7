"""Pipelines of any length and order, priced by duals: what bounds those too long to be told apart by their
composition.

For a step T every device of class k costs π_k. `cheapest` finds, for each number of micro-batches m, a lower
bound C(m) on the cost of every pipeline of more than `shortest` stages that does m micro-batches within T: a
shortest path over (place from the end, first layer), in which a stage is allowed only if

    before(lo) + work + wait + optimizer (+ gradient sums if lo = 0) ≤ T,

with the stage's work and memory as they are at its place, `before` the least time that the layers before lo
take once forward and once backward on any types, and `wait` that of `_floors` with the least round trip u of
any stages behind.

*Valid.* A pipeline that ends within T satisfies this at each of its stages: its first micro-batch must pass
the layers before lo forward, and its last one backward, outside of the stage's own time; the wait grows with
u; the step ends after the optimizer of each stage, and after the sums of the first. So it is a path, and
costs at least C(m). Places beyond those told apart count as the last of these: fewer in flight need no more
memory, and no wait is asked of them. ∎ O(L · K · G · L²) for G numbers of micro-batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners._batch import Index
from hetpipe.partitioners._floors import hops, wait
from hetpipe.partitioners._space import Array, Counts, Family, Load, Space, depth_of

BLOCKS = 8  # at most, of numbers of micro-batches


class Path(NamedTuple):
    """The pipeline with the most micro-batches per cost."""

    comp: Counts
    m: int


class Block(NamedTuple):
    """Numbers of micro-batches, and of each depth family the least T of every stage, [places][kinds][G, lo, hi]."""

    loads: tuple[Load, ...]
    tables: list[list[list[Array]]]


class Relaxed:
    """Tables of one micro-batch size at some numbers of micro-batches, for pipelines longer than `shortest`. C does
    not fall with m, so the cost at one of these numbers holds up to the next; more are added where it matters."""

    def __init__(self, space: Space, b: int, points: list[int], shortest: int) -> None:
        self.space, self.b, self.shortest = space, b, shortest
        self.need = space.problem.global_batch // b
        self.places = shortest + 2
        self.kinds = [k for k in range(space.K) if space.measured(k, b)]
        self.possible = min(space.L, sum(space.counts)) > shortest
        self.points: list[int] = []
        self.blocks: list[Block] = []
        self._kept: dict[tuple[int, float, int], Index] = {}
        if self.possible:
            self.add(points)

    def add(self, points: list[int]) -> None:
        """Tables at more numbers of micro-batches."""
        loads = tuple(Load(self.b, m) for m in points)
        tables = [table for f in self.space.families if (table := self._least(f, loads))]
        self.points = sorted({*self.points, *points})
        self.blocks.append(Block(loads, tables))
        self.space.forget()

    def most(self, loads: tuple[Load, ...]) -> Array:
        """Up to how many micro-batches the cost at each of these numbers holds."""
        after = np.searchsorted(self.points, [load.m for load in loads], side="right")
        ends = np.array([*self.points, self.need + 1])
        found: Array = np.minimum(self.need, ends[after] - 1).astype(np.float64)
        return found

    def _least(self, family: Family, loads: tuple[Load, ...]) -> list[list[Array]]:
        """The least T at which a stage is allowed, [places][kinds][G, lo, hi]; none if nothing fits."""
        space = self.space
        both = hops(space, loads[:1]).both.min(axis=(0, 1))
        both[[0, space.L]] = 0.0
        before = self._before(both)
        m = np.array([load.m for load in loads], dtype=np.float64)[:, None, None]
        away = np.full((len(loads), space.L + 1), np.inf)
        tables: list[list[Array]] = []
        for place in range(1, self.places + 1):
            depth = np.array([depth_of(family, place, load.m) for load in loads])[:, None, None]
            through, row = np.full_like(away, np.inf), []
            for k in self.kinds:
                stage = space.stage(k, place, family, loads)
                idle = np.zeros(1)
                if 1 < place < self.places:
                    u = np.where(np.isfinite(away), away, 0.0)[:, None, :]
                    idle = wait(u, stage.forward, stage.backward, depth, m)
                least = before[:, None] + stage.work + idle + space.optimizer(k)
                single: Any = least.astype(np.float32)  # less memory; rounded down
                row.append(single * np.float32(1 - 1e-6))
                behind = np.where(np.arange(space.L + 1) == space.L, 0.0, np.inf) if place == 1 else away
                found = (stage.through + np.broadcast_to(behind, away.shape)[:, None, :]).min(axis=2)
                through = np.minimum(through, found)
            away = through + both
            tables.append(row)
            if not np.isfinite(away).any():  # no suffix of so many stages fits, nor a longer one
                if place <= self.shortest:
                    return []
                row = [np.full_like(least, np.inf) for least in row]
                return tables + [row] * (self.places - place)
        return tables

    def _before(self, both: Array) -> Array:
        """Least seconds once forward and backward through the layers before lo, [L + 1]."""
        space = self.space
        times = [space.costs.time_prefix(space.kinds[k].type, self.b) for k in self.kinds]
        layers = np.minimum.reduce([np.diff(f) + np.diff(b) for f, b in times])
        total: Array = np.concatenate([[0.0], np.cumsum(layers)]) + both
        return total

    def best(self, T: float, R: int, prices: Array, fixed: float, enough: float) -> tuple[float, Path | None]:
        """The largest m / (cost + fixed) of any long pipeline within T, and one that reaches it; exact enough to
        tell whether it is above `enough`, but for a few times."""
        while True:
            most, found, loose = 0.0, None, set()
            for number, block in enumerate(self.blocks):
                reach = self._reach(number, T, R)
                least = self._cheapest(reach, prices)
                ratios = np.tile(self.most(block.loads), len(block.tables)) / np.maximum(
                    least * (1 - 1e-9) + fixed, 1e-300
                )
                if len(ratios) and ratios.max() > most:
                    most, found = float(ratios.max()), (number, int(ratios.argmax()))
                above: Any = np.asarray(ratios > enough).reshape(-1, len(block.loads)).any(axis=0)
                loose |= self._between(block.loads, above)
            if most <= enough or found is None:
                return most, None
            if not loose or len(self.blocks) >= BLOCKS:
                return most, self._path(*found, T, R, prices)
            self.add(sorted(loose))

    def _between(self, loads: tuple[Load, ...], chosen: NDArray[Any]) -> set[int]:
        """Numbers to look at within the chosen intervals."""
        ends = self.most(loads)
        found: set[int] = set()
        for i in np.flatnonzero(chosen):
            low, high = loads[i].m, int(ends[i])
            found |= set(np.unique(np.linspace(low, high + 1, 5)[1:-1].astype(int)).tolist()) - {
                low,
                high + 1,
            }
        return found

    def _reach(self, number: int, T: float, R: int) -> Index:
        """How far a stage can reach within T: the last hi that is allowed, [places, kinds, families · G, lo];
        L + 1 where none is."""
        if (number, T, R) not in self._kept:
            self._kept = {key: value for key, value in self._kept.items() if key[1:] == (T, R)}
            L, tables = self.space.L, self.blocks[number].tables
            sums = [self.space.sum_floor(k, R)[0] * (1 - 1e-6) for k in self.kinds]
            found = np.full(
                (self.places, len(self.kinds), len(tables), len(self.blocks[number].loads), L + 1), L + 1
            )
            for f, table in enumerate(tables):
                for place, row in enumerate(table):
                    for i, least in enumerate(row):
                        inside = least <= T
                        inside[:, 0] &= least[:, 0] + sums[i] <= T
                        last = L - inside[:, :, ::-1].argmax(axis=2)
                        found[place, i, f] = np.where(inside.any(axis=2), last, L + 1)
            self._kept[number, T, R] = found.reshape(self.places, len(self.kinds), -1, L + 1)
        return self._kept[number, T, R]

    def _cheapest(self, reach: Index, prices: Array) -> Array:
        """The least cost of a long pipeline, [families · G].

        `cost` [., lo] is the least of p stages that hold layers lo … L or more: it falls with lo, so a stage does
        best to reach as far as it can."""
        G, L = reach.shape[2], self.space.L
        cost, least, own = np.full((G, L + 2), np.inf), np.full(G, np.inf), prices[self.kinds][:, None, None]
        cost[:, L] = 0.0
        g = np.arange(G)[None, :, None]
        for place in range(1, L + 1):
            exact = (cost[g, reach[min(place, self.places) - 1]] + own).min(axis=0)
            np.minimum.accumulate(exact, axis=1, out=cost[:, :-1])
            if place > self.shortest:
                least = np.minimum(least, cost[:, 0])
            if (cost[:, L] >= least).all():
                break
        return least

    def _path(self, number: int, row: int, T: float, R: int, prices: Array) -> Path:
        """The pipeline that `_cheapest` found for one number of micro-batches."""
        reach, L = self._reach(number, T, R)[:, :, row], self.space.L
        costs = [np.append(np.where(np.arange(L + 1) == L, 0.0, np.inf), np.inf)]
        for place in range(1, L + 1):
            exact = (costs[-1][reach[min(place, self.places) - 1]] + prices[self.kinds][:, None]).min(axis=0)
            costs.append(np.append(np.minimum.accumulate(exact), np.inf))
        place = self.shortest + 1 + int(np.argmin([cost[0] for cost in costs[self.shortest + 1 :]]))
        used, lo = [0] * self.space.K, 0
        for p in range(place, 0, -1):
            ends = reach[min(p, self.places) - 1]  # [kinds, lo]
            exact = costs[p - 1][ends] + prices[self.kinds][:, None]
            at = int(exact[:, : lo + 1].min(axis=0).argmin())
            i = int(exact[:, at].argmin())
            used[self.kinds[i]] += 1
            lo = min(int(ends[i, at]), L)
        loads = self.blocks[number].loads
        return Path(tuple(used), int(self.most(loads)[row % len(loads)]))
