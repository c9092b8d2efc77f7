"""Drafts (`drafts`) by what is different in them: a lower bound on the step, and what they lack in memory. Pipelines of the
same work on the same types, joined by the same links, are one kind; so the effort hardly depends on the number of devices."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetpipe.partitioners.stage_kinds.memoized import memoized
from hetpipe.partitioners.step_times.drafts import Draft, Index, Runs, Work
from hetpipe.partitioners.step_times.earliest import ROUNDING, CommonWork, Earliest, PipelineRows
from hetpipe.partitioners.step_times.links import Links
from hetpipe.partitioners.step_times.sets import NumberedSets, unlike_rows
from hetpipe.planning.partition import Problem
from hetpipe.predict.cost import Costs
from hetpipe.spec.schedule import ScheduleName


class PipelineKind(NamedTuple):
    """Pipelines that do the same. Which types their stages are on, and which links are between them: by the numbers of these
    sets, of one each where all are alike."""

    work: Work
    types: tuple[int, ...]
    links: tuple[int, ...]


class Sketch(NamedTuple):
    """What is needed to bound a draft, or several that are alike, and to see whether it fits: its kinds of pipeline; for each
    place in a row, whether the devices there, which sum their gradients, are on several nodes for sure; and of one draft the rows
    of each kind."""

    pipelines: list[PipelineKind]
    spread: tuple[bool, ...]
    rows: tuple[Index, ...] = ()


def samples_in_flight(runs: Runs, depth: int) -> int:
    """Samples of the first so many micro-batches, which are the largest."""
    found = 0
    for size, count in runs:
        found += size * min(depth, count)
        depth -= min(depth, count)
    return found


class Appraiser:
    """Bounds of drafts of one problem, and what they lack in memory."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        cluster = problem.profile.joined(problem.cluster)
        self.costs, self.links = Costs(problem.profile, cluster), Links(cluster)
        self.L = len(problem.profile.layers)
        self.ids = [device.id for device in cluster.devices]
        self.types = list(dict.fromkeys(device.type for device in cluster.devices))
        self.type_of = np.array([self.types.index(device.type) for device in cluster.devices])
        self.limits = [cluster.device_types[kind].memory * (1 - problem.memory_reserve) for kind in self.types]
        self.largest_node = max(sum(node.devices.values()) for node in cluster.nodes)
        self.type_sets, self.link_sets = NumberedSets(), NumberedSets()
        self._bounds: dict[tuple[PipelineKind, tuple[bool, ...], int, ScheduleName], float] = {}
        self.earliest = Earliest(self.costs, self.links, self.types, self.type_sets, self.link_sets, early=problem.sums_early)

    def sketch(self, draft: Draft) -> Sketch:
        """The sketch of one draft."""
        nodes = self.links.node[draft.rows]
        if len({work.ends for work in draft.works}) == 1:
            spread = (nodes != nodes[0]).any(axis=0).tolist()
        else:
            spread = [len(nodes) > self.largest_node] * nodes.shape[1]
        pipelines, rows = zip(*self._pipelines(draft), strict=True)
        return Sketch(list(pipelines), tuple(spread), rows)

    def _pipelines(self, draft: Draft) -> Iterator[tuple[PipelineKind, Index]]:
        """The kinds of a draft's pipelines, and the rows of each."""
        for i in np.unique(draft.which).tolist():
            work, rows = draft.works[i], np.nonzero(draft.which == i)[0]
            devices = draft.rows[rows][:, work.used]
            n = len(work.used)
            table = np.hstack([self.type_of[devices], self.links.numbers(devices[:, :-1], devices[:, 1:])])
            first, where = unlike_rows(table)
            types, links = self.type_sets.singles(table[first, :n]), self.link_sets.singles(table[first, n:])
            for j in range(len(first)):
                yield PipelineKind(work, (*types[j].tolist(),), (*links[j].tolist(),)), rows[where == j]

    def busy(self, draft: Draft) -> float:
        """The seconds of the stage with most work: no plan of this draft has a shorter step, and little is needed to know it."""
        each = list[float]()
        for i, work in enumerate(draft.works):
            kinds = self.type_of[draft.rows[draft.which == i]][:, work.used]
            seconds = self._work(work.runs, work.ends, work.recomputes)
            each.append(float(seconds[kinds, np.arange(kinds.shape[1])].max(initial=0.0)))
        return max(each) * ROUNDING

    @memoized
    def _work(self, runs: Runs, ends: tuple[int, ...], recomputes: tuple[bool, ...]) -> NDArray[np.float64]:
        """Seconds of all micro-batches on each type, in each stage that has layers [K, n]."""
        lo, hi = np.array([(lo, hi) for lo, hi in pairwise(ends) if hi > lo]).T
        found, again = np.zeros((len(self.types), len(lo))), np.array(recomputes)
        for k, kind in enumerate(self.types):
            for size, count in runs:
                times = self.costs.time_prefix(kind, size)
                f, b, more = (prefix[hi] - prefix[lo] for prefix in (*times, self.costs.again(times[0])))
                found[k] += count * (f + again * more + b)
        return found

    def bound(self, sketch: Sketch, replicas: int, schedule: ScheduleName) -> float:
        """No plan of so many pipelines, with such ones among them, has a shorter step."""
        keys = {pipeline: (pipeline, sketch.spread, replicas, schedule) for pipeline in sketch.pipelines}
        alike: dict[object, list[PipelineKind]] = {}
        for pipeline, key in keys.items():
            if key not in self._bounds:
                same = pipeline.work.runs, pipeline.work.recompute, len(pipeline.types)
                alike.setdefault(same, []).append(pipeline)
        for some in alike.values():
            bounds = self._steps(some, sketch.spread, replicas, schedule)
            self._bounds |= {keys[pipeline]: bound for pipeline, bound in zip(some, bounds, strict=True)}
        return max(self._bounds[key] for key in keys.values())

    def _steps(
        self, pipelines: list[PipelineKind], spread: tuple[bool, ...], replicas: int, schedule: ScheduleName
    ) -> list[float]:
        """Bounds of kinds of pipeline with the same micro-batches and as many stages."""
        works = [pipeline.work for pipeline in pipelines]
        ends = np.array([work.stages for work in works])
        where = np.array(spread)[np.array([work.used for work in works])]
        types = np.array([pipeline.types for pipeline in pipelines])
        links = np.array([pipeline.links for pipeline in pipelines], dtype=np.int64)
        given = CommonWork(works[0].runs, works[0].recomputes[0], replicas, schedule)
        found: list[float] = self.earliest.steps(PipelineRows(types, links, ends[:, :, 0], ends[:, :, 1], where), given).tolist()
        return found

    def missing(self, sketch: Sketch, schedule: ScheduleName) -> dict[int, float]:
        """The most bytes that are missing on a device of each type, where any are."""
        found: dict[int, float] = {}
        for pipeline in sketch.pipelines:
            for s, (number, depth) in enumerate(zip(pipeline.types, pipeline.work.in_flight(schedule), strict=True)):
                for kind in self.type_sets.all[number]:
                    missing = self.peak(kind, s, pipeline.work, depth) - self.limits[kind]
                    if missing > 0:
                        found[kind] = max(found.get(kind, 0.0), missing)
        return found

    def peak(self, kind: int, s: int, work: Work, depth: int) -> int:
        """Greatest bytes of stage s."""
        part, recompute, degree = work.stages[s], work.recomputes[s], work.groups[s]
        return self._peak(kind, *part, work.samples, samples_in_flight(work.runs, depth), work.runs[0][0], recompute, degree)

    @memoized
    def _peak(
        self, kind: int, lo: int, hi: int, samples: int, window: int, largest: int, recompute: bool, degree: int
    ) -> int:
        memory = self.costs.stage_memory(self.types[kind], lo, hi, samples=samples, recompute=recompute, degree=degree)
        return memory.peak_of(window, largest)
