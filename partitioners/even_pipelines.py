"""`even-pipelines`: equal replicas of the best pipeline, for every number of them; slow or small devices may stay out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import chain, product

import numpy as np

from hetpipe.partitioners.pipelines.real import Pipeline, Reals
from hetpipe.partitioners.rules.baseline import SimpleRule, equal_parts
from hetpipe.partitioners.rules.grids import ends_of, grid_drafts, one_line, runs
from hetpipe.partitioners.stage_kinds.plan_class import require_stage_kinds
from hetpipe.partitioners.stage_kinds.types import Types
from hetpipe.partitioners.step_times.desk import Best, Candidate, Desk
from hetpipe.partitioners.step_times.drafts import Draft, Index

Take = tuple[int, ...]  # stages of each kind


class EvenPipelines(SimpleRule):
    """Equal replicas, for every number R of them: of each type a replica gets the R-th part of the devices, half of that, or
    none, and is the quickest pipeline of these that can be built (`Reals`). The batch is split evenly. Replicas lie side by side
    (a stage's owners are neighbours) or one after the other."""

    name = "even-pipelines"
    by_memory = True

    def candidates(self, desk: Desk) -> Iterator[Candidate]:
        """Each draft that fits and is faster than all before it; where none is, one pipeline over all devices, cut into equal
        numbers of layers, to say what is missing."""
        require_stage_kinds(desk.problem)
        shapes = _Shapes(desk, self.name)
        yield from shapes.run()
        if not shapes.best.count:
            rows = one_line(desk.problem)
            ends = ends_of(equal_parts(shapes.types.L, rows.size))
            for place, draft in enumerate(grid_drafts(desk, self.name, rows, lambda types, b: ends)):
                yield desk.candidate(place, draft)


class _Shapes:
    """All shapes of one problem: the stages of each kind in a replica, and how many replicas there can be of these."""

    def __init__(self, desk: Desk, name: str) -> None:
        self.desk, self.name, self.best, self.types = desk, name, Best(desk), Types(desk.problem)
        self.reals, self.batch = Reals(self.types), desk.problem.global_batch
        of_type = [np.flatnonzero(desk.appraiser.type_of == i) for i in range(self.types.K)]
        whole = [kind.degree == 1 and not kind.offload for kind in self.types.kinds]
        self.devices = [of_type[kind.at][: None if own else 0] for kind, own in zip(self.types.kinds, whole, strict=True)]

    def run(self) -> Iterator[Candidate]:
        """The plans that are better than those before them. A shape that could take least is next: its pipeline is built; and
        when the pipeline that takes least is next, it is offered."""
        waiting: list[tuple[float, int, Take, Pipeline | None]] = [(*shape, None) for shape in self.shapes()]
        heapify(waiting)
        every, built = len(waiting), 0
        while waiting and waiting[0][0] < self.best.step and not self.best.spent:
            if math.isfinite(self.best.step) and self.desk.late():
                return
            _, R, take, pipeline = heappop(waiting)
            if pipeline is not None:
                yield from self.offered(R, pipeline)
                continue
            if built % 20 == 0:
                self.desk.say(f"{self.name}, {built} of {every} shapes")
            built, pipeline = built + 1, self.reals.quickest(take, -(-self.batch // R), R, ())
            if pipeline is not None:
                heappush(waiting, (self.reals.seconds(pipeline, pipeline.samples, R), R, take, pipeline))

    def shapes(self) -> Iterator[tuple[float, int, Take]]:
        """About what each takes at least, its replicas, and its stages of each kind."""
        counts = [len(devices) for devices in self.devices]
        parts = dict.fromkeys(tuple(count // R for count in counts) for R in range(1, max(counts) + 1))
        takes = chain.from_iterable(product(*({part, part // 2, 0} for part in each)) for each in parts)
        for take in dict.fromkeys(takes):
            if 0 < sum(take) <= self.types.L:
                R = min(self.batch, *(there // count for there, count in zip(counts, take, strict=True) if count))
                yield self.least(take, R), R, take

    def least(self, take: Take, R: int) -> float:
        """About what R replicas take at least: each its share of the samples, or what it sends from node to node; then the sums
        that the last micro-batch does not hide. Infinite where no micro-batch size was measured on all."""
        share, n = -(-self.batch // R), sum(take)
        work, largest = self.reals.least(take, share), max(self.reals.sizes(take, share), default=0)
        sent = float(self.types.transfer(share)[0][0, 1:-1].min()) if n > self.types.largest_node else 0.0
        sums = min(float(self.types.sums(R)[v, 0, -1]) for v, count in enumerate(take) if count) / n
        return max(work, sent) + max(0.0, sums - work * min(1.0, largest / share)) if largest else math.inf

    def offered(self, R: int, p: Pipeline) -> Iterator[Candidate]:
        """Up to two drafts of R such pipelines, one for each way of placing them: those that are the best so far."""
        n, (share, more) = len(p.stages), divmod(self.batch, R)
        works = tuple(p.work(samples, self.types, 0) for samples in dict.fromkeys((share + (more > 0), share)))
        which = np.minimum((np.arange(R) >= more).astype(np.int64), len(works) - 1)
        for side_by_side in (True, False) if R > 1 and n > 1 else (True,):
            rows = self._rows(R, p, side_by_side=side_by_side)
            if runs(self.desk, rows):
                yield from self.best.offer(Draft(self.name, self.reals.schedule, rows, works, which))

    def _rows(self, R: int, p: Pipeline, *, side_by_side: bool) -> Index:
        """The devices of each replica [R, n], of each type the first ones of the cluster."""
        stages = np.array(p.stages)
        rows = np.zeros((R, len(stages)), dtype=np.int64)
        for v in set(p.stages):
            count = p.stages.count(v)
            own = self.devices[v][: R * count]
            rows[:, stages == v] = own.reshape(count, R).T if side_by_side else own.reshape(R, count)
        return rows


partitioner = EvenPipelines()
