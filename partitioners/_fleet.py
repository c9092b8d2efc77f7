"""From the linear program to real pipelines: whole numbers of each kind of replica, exact shares, gradient sums."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds as Box
from scipy.optimize import LinearConstraint, milp

from hetpipe.partitioners._columns import Column, Counts
from hetpipe.partitioners._kinds import Array
from hetpipe.partitioners._loads import first_samples
from hetpipe.partitioners._master import Master
from hetpipe.partitioners._paths import Paths, Pipeline
from hetpipe.spec.cluster import Link

ROUNDS = 24
PROGRAM = 50_000  # partial pipelines that take as long as one integer program
TRIES = 6  # numbers of samples per composition and micro-batch size
OPTIMISTIC = 1.03  # columns bounded at up to this much more than T are looked at


class Group(NamedTuple):
    """`number` replicas that are the same pipeline."""

    number: int
    pipeline: Pipeline


class Fleet:
    """Replicas that do the whole batch within T."""

    def __init__(self, master: Master, paths: Paths) -> None:
        self.master, self.paths, self.kinds, self.columns = master, paths, master.kinds, master.columns
        self._real: dict[tuple[Counts, float, int], Pipeline | None] = {}

    def groups(self, T: float, R: int, most: int, work: float = math.inf) -> list[Group] | None:
        """At most `most` replicas that do the batch within T, as far as their own gradient sums beside about R others
        go; None if none were found, with so much work (`Paths.work`)."""
        wanted = self.wanted(T)
        comps = list(wanted)
        if not comps:
            return None
        capacity = np.array([max(c.samples for c in wanted[x]) for x in comps], dtype=np.float64)
        real: dict[int, Pipeline | None] = {}
        bound, part = capacity.copy(), 1.0
        for _ in range(ROUNDS):
            y = self._program(comps, capacity, most)
            self.paths.work += PROGRAM
            if y is None or float(capacity @ y) < self.master.batch:
                return None
            unknown = [i for i in np.flatnonzero(y).tolist() if i not in real]
            if not unknown:
                return self.dealt([Group(int(y[i]), p) for i, p in real.items() if p is not None and y[i] > 0])
            for i in unknown:
                if self.paths.work > work:
                    return None
                real[i] = self.real(comps[i], wanted[comps[i]], T, R)
                found = real[i]
                capacity[i] = found.samples if found is not None else 0
            part = float(np.mean([capacity[i] / bound[i] for i in real]))
            for i in range(len(comps)):  # what was not looked at will fall short of its bound, too
                if i not in real:
                    capacity[i] = min(bound[i], math.ceil(bound[i] * (1 + part) / 2))
        return None

    def wanted(self, T: float) -> dict[Counts, list[Column]]:
        """Of each composition the columns at each micro-batch size, most samples first."""
        found: dict[Counts, list[Column]] = {}
        for used, columns in self.master.known.items():
            best: dict[int, Column] = {}
            for t, _, column in columns:
                if t <= T * OPTIMISTIC and column.samples > best.get(column.size, column._replace(samples=0)).samples:
                    best[column.size] = column
            if best:
                found[used] = sorted(best.values(), key=lambda c: -c.samples)
        return found

    def real(self, used: Counts, columns: list[Column], T: float, R: int) -> Pipeline | None:
        """The simulated pipeline of a composition that does the most samples within T."""
        key = (used, T, R)
        if key not in self._real:
            self._real[key] = self._search(used, columns, T, R)
        return self._real[key]

    def _search(self, used: Counts, columns: list[Column], T: float, R: int) -> Pipeline | None:
        """From the most samples down, by as many as the best pipeline is late."""
        sums, best = self.columns.sums(R), None
        for column in columns:
            samples = column.samples
            for _ in range(TRIES):
                if samples < first_samples(self.columns.stages, column.size) or (best is not None and samples <= best.samples):
                    break
                late = T
                for path in self.paths.search(T, R, used, column.size, samples):
                    found = self.paths.simulated(path, column.size, samples)
                    if found is not None and found.end(sums) <= T:
                        best = found
                        break
                    if found is not None:
                        late = min(late, found.end(sums)) if late > T else found.end(sums)
                else:
                    samples -= max(1, int((late / T - 1) * samples))
                    continue
                break
        return best

    def _program(self, comps: list[Counts], capacity: Array, most: int) -> Array | None:
        """Whole numbers of pipelines with the largest capacity (HiGHS)."""
        devices = np.array(comps, dtype=np.float64).T
        rows = [
            LinearConstraint(devices, -np.inf, np.array(self.kinds.counts)),
            LinearConstraint(np.ones((1, len(comps))), 1, most),
        ]
        if math.isfinite(self.master.most_price):
            rows.append(LinearConstraint((self.kinds.prices @ devices)[None, :], -np.inf, self.master.most_price * (1 + 1e-12)))
        fewer = 1e-4 * devices.sum(axis=0) / sum(self.kinds.counts)
        useful = np.where(capacity > 0, float(max(self.kinds.counts)), 0.0)
        found = milp(fewer - capacity, constraints=rows, integrality=np.ones(len(comps)), bounds=Box(0, useful),
                     options={"time_limit": 0.2, "mip_rel_gap": 1e-4, "presolve": False})  # fmt: skip
        return None if found.x is None else np.rint(found.x)

    def dealt(self, groups: list[Group]) -> list[Group]:
        """The same replicas with exactly the batch: one sample less for those that end last, again and again."""
        surplus = sum(g.number * g.pipeline.samples for g in groups) - self.master.batch
        sums = self.columns.sums(sum(g.number for g in groups))
        while surplus > 0:
            groups = sorted(groups, key=lambda g: -g.pipeline.end(sums))
            last = next((g for g in groups if g.pipeline.samples > 1), None)
            if last is None:
                break
            less = self.paths.simulated(last.pipeline.path, last.pipeline.size, last.pipeline.samples - 1)
            assert less is not None  # fewer samples need no more memory
            number = min(surplus, last.number)
            groups = [g for g in groups if g is not last] + [Group(number, less)]
            if last.number > number:
                groups.append(Group(last.number - number, last.pipeline))
            surplus -= number
        return _joined(groups)

    def step(self, groups: list[Group]) -> float:
        """About the step of these replicas: gradient sums as in `hetpipe.predict.simulator`, over the slowest link between
        nodes, and counted."""
        R = sum(g.number for g in groups)
        free = [np.array(g.pipeline.ready) for g in groups]
        starts = [np.array(g.pipeline.path.cuts[1:-1]) for g in groups]
        degrees = [[self.kinds.kinds[v].degree for v in g.pipeline.path.kinds] for g in groups]
        synced = max(float(f.max()) for f in free)
        cuts = sorted({x for g in groups for x in g.pipeline.path.cuts})
        for lo, hi in reversed(list(itertools.pairwise(cuts))):
            at = [int((x <= lo).sum()) for x in starts]
            size = float(self.kinds.summed[lo:hi].sum())
            if R < 2 or size <= 0:
                continue
            pieces = math.lcm(*(d[s] for d, s in zip(degrees, at, strict=True)))
            begin = max(float(f[s]) for f, s in zip(free, at, strict=True))
            once = 2 * (R - 1) * max((x.seconds(size / pieces / R) for x in self._links(R)), default=0.0)
            end = begin + once * pieces / min(d[s] for d, s in zip(degrees, at, strict=True))
            for f, s in zip(free, at, strict=True):
                f[s] = end
            synced = max(synced, end)
        return synced + max(g.pipeline.optimizer for g in groups)

    def _links(self, R: int) -> list[Link]:
        inside = [c.inside for c in self.kinds.classes if c.inside is not None]
        return self.kinds.between if self.kinds.largest_node < R or not inside else [*inside, *self.kinds.between]


def _joined(groups: list[Group]) -> list[Group]:
    """Each pipeline once."""
    numbers: dict[tuple[object, ...], Group] = {}
    for g in groups:
        key = (g.pipeline.path, g.pipeline.size, g.pipeline.samples)
        numbers[key] = Group(g.number + (numbers[key].number if key in numbers else 0), g.pipeline)
    return list(numbers.values())
