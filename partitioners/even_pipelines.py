"""`even-pipelines`: equal pipelines with balanced cuts, for every number of them; slow or small devices may stay out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from typing import NamedTuple

import numpy as np

from hetpipe.partitioners.rules.baseline import equal_parts, recompute_choices, solve
from hetpipe.partitioners.rules.grids import ends_of, runs
from hetpipe.partitioners.rules.lines import Lines, TypeRuns, Used
from hetpipe.partitioners.step_times.desk import Best, Candidate, Desk
from hetpipe.partitioners.step_times.drafts import Draft, Index, Work, in_runs
from hetpipe.planning.partition import Problem, Solution


@dataclass(frozen=True)
class EvenPipelines:
    """Equal replicas, for every number R of them: of each type a replica gets the R-th part of the devices, half of that, or
    none; its stages are in runs of one type, the types in the order of their memory or speed, either way; its layers are cut so
    that the slowest stage is as fast as memory lets it be, by bisection; the batch is split evenly; 1F1B. Every measured
    micro-batch size, recompute nowhere or everywhere, replicas side by side (a stage's owners are neighbours) or one after the
    other."""

    name: str = "even-pipelines"

    def __call__(self, problem: Problem) -> Solution:
        """The best of these plans that fits."""
        return solve(problem, self, by_memory=True)

    def candidates(self, desk: Desk) -> Iterator[Candidate]:
        """Each draft that fits and is faster than all before it; where none fits, one draft to say what is missing."""
        found = EvenShapes(desk, self.name)
        yield from found.run()
        if not found.best.count:
            yield from found.nothing()


class EvenShape(NamedTuple):
    """R replicas of the same types, so many of each, with micro-batches of b samples."""

    bound: float
    R: int
    used: Used
    b: int
    recompute: bool


class EvenShapes:
    """All shapes of one problem, tried least bound first, until the next is not below the best step."""

    def __init__(self, desk: Desk, name: str) -> None:
        self.desk, self.name, self.lines = desk, name, Lines(desk)
        self.best = Best(desk)

    def run(self) -> Iterator[Candidate]:
        """The plans that are better than those before them."""
        for number, shape in enumerate(self.all):
            if shape.bound >= self.best.step or self.best.spent or (math.isfinite(self.best.step) and self.desk.late()):
                return
            if number % 20 == 0:
                self.desk.say(f"{self.name}, {number} of {len(self.all)} shapes")
            for line in self.lines.of(shape.used):
                yield from self.of(shape, line)

    @cached_property
    def all(self) -> list[EvenShape]:
        """All shapes, sorted by what their arithmetic and gradient sums take at least."""
        return sorted(self._shapes())

    def _shapes(self) -> Iterator[EvenShape]:
        counts = [len(devices) for devices in self.lines.devices]
        parts = dict.fromkeys(tuple(count // R for count in counts) for R in range(1, max(counts) + 1))
        parts_used = (product(*({part, part // 2, 0} for part in each)) for each in parts)
        for used in dict.fromkeys(chain.from_iterable(parts_used)):
            if 0 < sum(used) <= self.lines.L:
                yield from self._sizes(self.lines.most(used), used)

    def _sizes(self, R: int, used: Used) -> Iterator[EvenShape]:
        share, sums = -(-self.lines.batch // R), self.lines.sums(R)
        for b in self.lines.sizes:
            if b > share:
                return
            for recompute in recompute_choices(self.lines.problem):
                longest = self.lines.longest(used, b, recompute)
                if longest is not None:
                    least = (share // b - 1) * longest + max(longest, sums / sum(used))  # sums begin in the last backward
                    yield EvenShape(least, R, used, b, recompute)

    def of(self, shape: EvenShape, line: TypeRuns) -> Iterator[Candidate]:
        """Up to two drafts of a shape, one for each way of placing it: those that are the best so far."""
        share, more = divmod(self.lines.batch, shape.R)
        works = []
        for samples in dict.fromkeys((share + (more > 0), share)):
            sizes = in_runs(samples, shape.b)
            cut = self.lines.cut(line, sizes, shape.recompute) if sizes else None
            if cut is None:
                return
            m, sums = samples // shape.b, self.lines.sums(shape.R) / sum(shape.used)
            if max(cut.least(m), cut.least(m - 1) + sums) >= self.best.step:
                return
            works.append(Work(sizes, cut.ends, shape.recompute))
        which = np.minimum((np.arange(shape.R) >= more).astype(np.int64), len(works) - 1)
        for side_by_side in (True, False) if shape.R > 1 and sum(shape.used) > 1 else (True,):
            rows = self._rows(shape.R, line, side_by_side=side_by_side)
            if runs(self.desk, rows):
                yield from self.best.offer(Draft(self.name, self.lines.schedule, rows, tuple(works), which))

    def _rows(self, R: int, line: TypeRuns, *, side_by_side: bool) -> Index:
        """The devices of each replica [R, n], of each type the first ones of the cluster."""
        found = []
        for kind, count in line.parts:
            own = self.lines.devices[kind][: R * count]
            found.append(own.reshape(count, R).T if side_by_side else own.reshape(R, count))
        return np.hstack(found)

    def nothing(self) -> Iterator[Candidate]:
        """A draft of one pipeline over all devices, equally cut."""
        rows = np.arange(min(len(self.lines.appraiser.ids), self.lines.L))[None, :]
        if not runs(self.desk, rows):
            return
        ends = tuple(ends_of(equal_parts(self.lines.L, rows.shape[1])))
        for recompute in recompute_choices(self.lines.problem):
            work = Work(in_runs(self.lines.batch, self.lines.sizes[0]), ends, recompute)
            draft = Draft(self.name, self.lines.schedule, rows, (work,), np.zeros(1, dtype=np.int64))
            yield self.desk.candidate(0, draft)


partitioner = EvenPipelines()
